// A sum with a factor, which tch's `add_` does not take.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "guard.h"

using namespace ssdtrain;

extern "C" st_status st_axpy(double alpha, const st_tensor* x, const st_tensor* y) {
  return guarded([&] {
    const c10::NoGradGuard no_grad;
    at::Tensor sum = *reinterpret_cast<const at::Tensor*>(y);
    sum.add_(*reinterpret_cast<const at::Tensor*>(x), alpha);
  });
}
