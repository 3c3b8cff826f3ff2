// Reads and writes of a thread's elements.
template <typename T>
__device__ __forceinline__ void read_all(T (&to)[LANES], const T* from) {
#pragma unroll
  for (int part = 0; part < LANES * (int)sizeof(T) / 16; ++part) {
    reinterpret_cast<uint4*>(to)[part] = reinterpret_cast<const uint4*>(from)[part];
  }
}
template <typename T>
__device__ __forceinline__ void read(T (&to)[LANES], const T* from, position at, position count) {
  if (count - at >= LANES) return read_all(to, from + at);
#pragma unroll
  for (int lane = 0; lane < LANES; ++lane) to[lane] = at + lane < count ? from[at + lane] : T(0);
}
// Writes what was made, or notes whether it differs from what is there.
template <typename T>
__device__ __forceinline__ void settle(T* to, const T (&made)[LANES], position at, position count, unsigned* differs) {
  if (differs != nullptr) {
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
      if (at + lane < count && to[at + lane] != made[lane]) *differs = 1;
    }
  } else if (count - at >= LANES) {
#pragma unroll
    for (int part = 0; part < LANES * (int)sizeof(T) / 16; ++part) {
      reinterpret_cast<uint4*>(to + at)[part] = reinterpret_cast<const uint4*>(made)[part];
    }
  } else {
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
      if (at + lane < count) to[at + lane] = made[lane];
    }
  }
}
