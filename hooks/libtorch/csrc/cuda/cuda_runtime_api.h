// The few declarations of CUDA's runtime that libtorch's header for its caching allocator needs, so that the shim
// builds without CUDA. They are declarations only: nothing here is called, and no CUDA library is linked.
#pragma once
#include <cstddef>

typedef struct CUstream_st* cudaStream_t;
typedef enum cudaError { cudaSuccess = 0 } cudaError_t;
enum cudaMemcpyKind {};
enum cudaStreamCaptureMode {};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2
};

cudaError_t cudaDeviceGetStreamPriorityRange(int*, int*);
const char* cudaGetErrorString(cudaError_t);
cudaError_t cudaGetLastError();
cudaError_t cudaMemGetInfo(size_t*, size_t*);
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t);
cudaError_t cudaStreamGetPriority(cudaStream_t, int*);
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*);
cudaError_t cudaStreamQuery(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*);
