// Storages: identity, lifetime, bytes.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "guard.h"
#include "of_thread.h"

namespace ssdtrain {

namespace {
// The latest message of a thread whose strings are gone.
thread_local char late_error[256];

c10::StorageImpl* impl(st_storage* storage) { return reinterpret_cast<c10::StorageImpl*>(storage); }
const c10::StorageImpl* impl(const st_storage* storage) { return reinterpret_cast<const c10::StorageImpl*>(storage); }

// Must not outlive whoever holds the storage.
at::Tensor elements(const st_storage* storage) {
  auto* of = const_cast<c10::StorageImpl*>(impl(storage));
  const auto keys = c10::DispatchKeySet(of->device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(of)), keys,
      caffe2::TypeMeta::Make<uint8_t>());
  view.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(of->nbytes())});
  return view;
}

}  // namespace

st_status fail(const char* message) noexcept {
  std::string* last_error = of_thread<std::string>();
  if (last_error == nullptr) {
    const size_t length = std::min(std::strlen(message), sizeof(late_error) - 1);
    std::memcpy(late_error, message, length);
    late_error[length] = '\0';
    return 1;
  }
  try {
    *last_error = message;
  } catch (...) {
    last_error->clear();
  }
  return 1;
}

}  // namespace ssdtrain

using ssdtrain::elements;
using ssdtrain::impl;

extern "C" {

const char* st_last_error(void) {
  const std::string* last_error = ssdtrain::of_thread<std::string>();
  return last_error == nullptr ? ssdtrain::late_error : last_error->c_str();
}

st_storage* st_tensor_storage(const st_tensor* tensor) {
  const auto& t = *reinterpret_cast<const at::TensorBase*>(tensor);
  if (!t.defined() || !t.has_storage()) return nullptr;
  return reinterpret_cast<st_storage*>(t.storage().unsafeGetStorageImpl());
}

uint64_t st_tensor_gradient_bytes(const st_tensor* tensor) {
  const auto& t = *reinterpret_cast<const at::TensorBase*>(tensor);
  if (!t.defined()) return 0;
  const at::Tensor& gradient = t.unsafeGetTensorImpl()->grad();
  return gradient.defined() && gradient.has_storage() ? gradient.storage().nbytes() : 0;
}

uint64_t st_storage_bytes(const st_storage* storage) { return impl(storage)->nbytes(); }
st_status st_storage_stream(const st_storage* storage, int64_t* stream) {
  return ssdtrain::guarded([&] {
    const c10::Device device = impl(storage)->device();
    *stream = device.is_cpu() ? 0 : c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
  });
}

st_status st_storage_record_use(const st_storage* storage) {
  return ssdtrain::guarded([&] {
    const c10::Device device = impl(storage)->device();
    if (device.is_cpu()) return;
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.recordDataPtrOnStream(impl(storage)->data_ptr(), guard.getStream(device));
  });
}

uint64_t st_storage_owners(const st_storage* storage) {
  return c10::raw::intrusive_ptr::use_count(const_cast<c10::StorageImpl*>(impl(storage)));
}

// Not StorageImpl::mutable_data, which would copy a copy-on-write storage: stores only read, and loads fill storages
// of our own.
void* st_storage_data(const st_storage* storage) { return impl(storage)->data_ptr().get(); }

st_status st_storage_allocate(uint64_t bytes, st_storage** storage) {
  return ssdtrain::guarded([&] {
    auto fresh = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(bytes), c10::GetCPUAllocator(), /*resizable=*/true);
    *storage = reinterpret_cast<st_storage*>(fresh.release());
  });
}

st_status st_storage_elements(const st_storage* storage, st_tensor** out) {
  return ssdtrain::guarded([&] { *out = reinterpret_cast<st_tensor*>(new at::Tensor(elements(storage))); });
}

st_status st_storage_copy(const st_storage* storage, st_storage** copy) {
  return ssdtrain::guarded([&] {
    const at::DisableRecordFunctionGuard unseen;
    const c10::impl::ExcludeDispatchKeyGuard unrecorded(c10::DispatchKey::Fake);
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor copied = elements(storage).clone();
    const c10::Device device = impl(storage)->device();
    if (!device.is_cpu()) {
      const c10::impl::VirtualGuardImpl guard(device.type());
      guard.synchronizeStream(guard.getStream(device));
    }
    *copy = reinterpret_cast<st_storage*>(c10::Storage(copied.storage()).unsafeReleaseStorageImpl());
  });
}

void st_storage_retain(st_storage* storage) { c10::raw::intrusive_ptr::incref(impl(storage)); }
void st_storage_release(st_storage* storage) { c10::raw::intrusive_ptr::decref(impl(storage)); }
void st_storage_weak_retain(st_storage* storage) { c10::raw::weak_intrusive_ptr::incref(impl(storage)); }
void st_storage_weak_release(st_storage* storage) { c10::raw::weak_intrusive_ptr::decref(impl(storage)); }
bool st_storage_lock(st_storage* storage) { return c10::raw::weak_intrusive_ptr::lock(impl(storage)) != nullptr; }

}  // extern "C"
