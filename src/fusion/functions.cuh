// What libtorch's kernels compute for an element, written as there.
__device__ __forceinline__ float from_float(unsigned x) { return __uint_as_float(x); }
__device__ __forceinline__ unsigned to_float(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float add(float a, float b, float alpha) { return __fmaf_rn(alpha, b, a); }
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float negate(float x) { return -x; }
__device__ __forceinline__ float absolute(float x) { return fabsf(x); }
__device__ __forceinline__ float reciprocal(float x) { return __fdiv_rn(1.0f, x); }
__device__ __forceinline__ float square(float x) { return __fmul_rn(x, x); }
__device__ __forceinline__ float square_root(float x) { return __fsqrt_rn(x); }
__device__ __forceinline__ float reciprocal_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ __forceinline__ float relu(float x) { return fmaxf(x, 0.0f); }
__device__ __forceinline__ float gelu(float x) {
  return __fmul_rn(x * 0.5f, 1.0f + erff(x * (float)0.70710678118654752440));
}
__device__ __forceinline__ float gelu_by_tangent(float x) {
  const float cube = x * x * x;
  const float inner = (float)(1.41421356237309504880 * 1.12837916709551257390 * 0.5) * (x + (float)0.044715 * cube);
  return __fmul_rn(0.5f * x, 1.0f + tanhf(inner));
}
__device__ __forceinline__ float layer_norm(float x, float mean, float root, float weight, float bias) {
  return __fmaf_rn(__fmul_rn(x - mean, root), weight, bias);
}
__device__ __forceinline__ float root_mean_square_norm(float x, float root, float weight) {
  return __fmul_rn(__fmul_rn(x, root), weight);
}
__device__ __forceinline__ float batch_norm(float x, float mean, float root, float weight, float bias) {
  return __fmaf_rn(__fmul_rn(x - mean, weight), root, bias);
}
__device__ __forceinline__ float batch_norm_folded(float x, float mean, float root, float weight, float bias) {
  const float scale = __fmul_rn(weight, root);
  return __fmaf_rn(x, scale, bias - __fmul_rn(mean, scale));
}
