// The C interface for what tch does not offer the models. Tensors are borrowed for the call. No C++ exception leaves
// a function declared here: it returns null, or an error message that is valid until the next failure on the calling
// thread.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <exception>
#include <string>

extern "C" {

// y += alpha * x, in place and not recorded.
const char* ssdtrain_axpy(double alpha, const at::Tensor* x, const at::Tensor* y);

// input . weight^T + bias (null: none); backward adds to the weight's gradient in place. *out is new and belongs to
// the caller.
const char* ssdtrain_linear(const at::Tensor* input, const at::Tensor* weight, const at::Tensor* bias, at::Tensor** out);

// Whether autograd records operations on the tensor now.
bool ssdtrain_is_recorded(const at::Tensor* tensor);

// A tensor with value's bytes, whose gradient with respect to inputs[i] is gradients[i], for a gradient of 1 of its own.
// Gradients are scaled in place by a backward that releases the graph: they must be nobody else's. *out is new and
// belongs to the caller.
const char* ssdtrain_known(const at::Tensor* value, size_t count, const at::Tensor* const* inputs,
                           const at::Tensor* const* gradients, at::Tensor** out);

}  // extern "C"

namespace ssdtrain::models {

inline const char* kept(const char* message) noexcept {
  static thread_local std::string last;
  try {
    last = message;
  } catch (...) {
    return "out of memory, and none for the message";
  }
  return last.c_str();
}

// Runs `body`; whatever it throws becomes a message.
template <class Body>
const char* guarded(Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const c10::Error& e) {
    return kept(e.what_without_backtrace());
  } catch (const std::exception& e) {
    return kept(e.what());
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace ssdtrain::models
