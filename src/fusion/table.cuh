// A result for each of the values that 16 bits have. A launch that compares computes them all and leaves them to those that come after it.
__device__ uint4 table[CODES * sizeof(unsigned short) / sizeof(uint4)];
template <int PARTS>
__device__ __forceinline__ void look_up(const unsigned short* from, unsigned short* to, position count, unsigned* differs) {
  extern __shared__ uint4 shared[];
  unsigned short* const known = reinterpret_cast<unsigned short*>(shared);
  if (differs != nullptr) {
    for (unsigned code = threadIdx.x; code < CODES; code += blockDim.x) known[code] = computed(code);
    __syncthreads();
    for (unsigned part = threadIdx.x; blockIdx.x == 0 && part < sizeof(table) / sizeof(uint4); part += blockDim.x) {
      table[part] = shared[part];
    }
  } else {
    for (unsigned part = threadIdx.x; part < sizeof(table) / sizeof(uint4); part += blockDim.x) shared[part] = table[part];
    __syncthreads();
  }
  const position row = (position)blockDim.x * LANES, all = row * PARTS;
  for (position first = all * blockIdx.x + threadIdx.x * LANES; first < count; first += all * gridDim.x) {
    alignas(16) unsigned short lanes[PARTS][LANES];
    // All parts are on their way before the first is looked at.
    if (count - first >= row * (PARTS - 1) + LANES) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) read_all(lanes[part], from + first + row * part);
    } else {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        if (first + row * part < count) read(lanes[part], from, first + row * part, count);
      }
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const position at = first + row * part;
      if (at >= count) break;
#pragma unroll
      for (int lane = 0; lane < LANES; ++lane) lanes[part][lane] = known[lanes[part][lane]];
      settle(to, lanes[part], at, count, differs);
    }
  }
}
