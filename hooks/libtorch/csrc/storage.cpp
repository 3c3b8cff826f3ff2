// Storages: identity, lifetime, bytes.
#include <ATen/core/TensorBase.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "guard.h"

namespace ssdtrain {

namespace {
thread_local std::string last_error;

c10::StorageImpl* impl(st_storage* storage) { return reinterpret_cast<c10::StorageImpl*>(storage); }
const c10::StorageImpl* impl(const st_storage* storage) { return reinterpret_cast<const c10::StorageImpl*>(storage); }
}  // namespace

st_status fail(const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();
  }
  return 1;
}

}  // namespace ssdtrain

using ssdtrain::impl;

extern "C" {

const char* st_last_error(void) { return ssdtrain::last_error.c_str(); }

st_storage* st_tensor_storage(const st_tensor* tensor) {
  const auto& t = *reinterpret_cast<const at::TensorBase*>(tensor);
  if (!t.defined() || !t.has_storage()) return nullptr;
  return reinterpret_cast<st_storage*>(t.storage().unsafeGetStorageImpl());
}

uint64_t st_storage_bytes(const st_storage* storage) { return impl(storage)->nbytes(); }

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

void st_storage_retain(st_storage* storage) { c10::raw::intrusive_ptr::incref(impl(storage)); }
void st_storage_release(st_storage* storage) { c10::raw::intrusive_ptr::decref(impl(storage)); }
void st_storage_weak_retain(st_storage* storage) { c10::raw::weak_intrusive_ptr::incref(impl(storage)); }
void st_storage_weak_release(st_storage* storage) { c10::raw::weak_intrusive_ptr::decref(impl(storage)); }
bool st_storage_lock(st_storage* storage) { return c10::raw::weak_intrusive_ptr::lock(impl(storage)) != nullptr; }

}  // extern "C"
