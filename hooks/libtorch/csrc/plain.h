// Tensors whose bytes are all there is to them.
#pragma once
#include <ATen/ATen.h>

namespace ssdtrain {

// A dense strided tensor without any wrapper whose meaning lies outside its storage. Autocast keys are allowed;
// otherwise everything saved under autocast would be skipped.
inline bool is_plain(const at::Tensor& t) {
  static const uint64_t allowed =
      c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCPU,
                           c10::DispatchKey::AutogradCUDA, c10::DispatchKey::ADInplaceOrView,
                           c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA})
          .raw_repr();
  return (t.key_set().raw_repr() & ~allowed) == 0 && t.layout() == at::kStrided && t.has_storage() &&
         t.storage().data() != nullptr;
}

}  // namespace ssdtrain
