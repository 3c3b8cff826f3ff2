// Tensors whose bytes are all there is to them.
#pragma once
#include <ATen/ATen.h>

namespace ssdtrain {

// A dense strided tensor without any wrapper whose meaning lies outside its storage. Autocast keys are allowed;
// otherwise everything saved under autocast would be skipped. What borrows memory that no storage owns (`from_blob`) is
// not plain: whoever owns it may fill or free it as soon as autograd needs it no more, and would not get it back sooner.
inline bool is_plain(const at::Tensor& t) {
  static const uint64_t allowed =
      c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCPU,
                           c10::DispatchKey::AutogradCUDA, c10::DispatchKey::ADInplaceOrView,
                           c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA})
          .raw_repr();
  return (t.key_set().raw_repr() & ~allowed) == 0 && t.layout() == at::kStrided && t.has_storage() &&
         t.storage().data() != nullptr && t.storage().data_ptr().get_context() != nullptr;
}

}  // namespace ssdtrain
