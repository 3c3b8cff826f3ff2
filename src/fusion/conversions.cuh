// Between the bits of a type and 32 bits; 16 bits are rounded to even.
__device__ __forceinline__ float from_bfloat(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
__device__ __forceinline__ unsigned short to_bfloat(float x) {
  unsigned short y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float from_half(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ unsigned short to_half(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ unsigned short negate_half(unsigned short x) {
  unsigned short y;
  asm("neg.f16 %0, %1;" : "=h"(y) : "h"(x));
  return y;
}
