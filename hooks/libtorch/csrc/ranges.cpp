// Named ranges for NVIDIA's tools, through libtorch's profiler: libtorch_cuda includes NVTX, which looks for a tool
// by itself.
#include <torch/csrc/profiler/stubs/base.h>

#include "guard.h"

extern "C" {

bool st_ranges(void) { return torch::profiler::impl::cudaStubs()->enabled(); }

st_status st_range_push(const char* name) {
  return ssdtrain::guarded([&] { torch::profiler::impl::cudaStubs()->rangePush(name); });
}

st_status st_range_pop(void) {
  return ssdtrain::guarded([] { torch::profiler::impl::cudaStubs()->rangePop(); });
}

}  // extern "C"
