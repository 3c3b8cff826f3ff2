// Device memory and streams, through libtorch's device-neutral interfaces: no CUDA header, and no CUDA library to
// link.
#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>

#include "guard.h"

namespace {

c10::Device cuda(int8_t index) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)}; }

}  // namespace

extern "C" {

st_status st_deterministic(void) {
  return ssdtrain::guarded([] {
    // cuBLAS reads this variable when it is first used.
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  });
}

st_status st_device_initialise(void) {
  return ssdtrain::guarded([] { at::globalContext().lazyInitDevice(c10::DeviceType::CUDA); });
}

st_status st_device_stream(int8_t index, void** stream) {
  return ssdtrain::guarded([&] {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    *stream = guard.getStreamNativeHandle(guard.getStream(cuda(index)));
  });
}

st_status st_device_exchange_stream(int8_t index, int64_t stream, int64_t* before) {
  return ssdtrain::guarded([&] {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    *before = guard.exchangeStream(c10::Stream(c10::Stream::UNSAFE, cuda(index), stream)).id();
  });
}

st_status st_device_allocate(int8_t index, uint64_t bytes, st_storage** storage) {
  return ssdtrain::guarded([&] {
    const c10::DeviceGuard on(cuda(index));
    auto fresh = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(bytes), c10::GetAllocator(c10::DeviceType::CUDA),
        /*resizable=*/true);
    *storage = reinterpret_cast<st_storage*>(fresh.release());
  });
}

st_status st_device_memory(int8_t index, st_memory* memory) {
  return ssdtrain::guarded([&] {
    const auto stats = c10::getDeviceAllocator(c10::DeviceType::CUDA)->getDeviceStats(static_cast<c10::DeviceIndex>(index));
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto& allocated = stats.allocated_bytes[all];
    *memory = {static_cast<uint64_t>(allocated.current), static_cast<uint64_t>(allocated.peak),
               static_cast<uint64_t>(stats.reserved_bytes[all].current), static_cast<uint64_t>(stats.num_device_alloc)};
  });
}

st_status st_device_reset_peak(int8_t index) {
  return ssdtrain::guarded([&] {
    c10::getDeviceAllocator(c10::DeviceType::CUDA)->resetPeakStats(static_cast<c10::DeviceIndex>(index));
  });
}

st_status st_device_trim(void) {
  return ssdtrain::guarded([] { c10::getDeviceAllocator(c10::DeviceType::CUDA)->emptyCache(); });
}

st_status st_device_free(int8_t index, uint64_t* bytes) {
  return ssdtrain::guarded([&] {
    auto* const allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
    const auto device = static_cast<c10::DeviceIndex>(index);
    const auto stats = allocator->getDeviceStats(device);
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto idle = stats.reserved_bytes[all].current - stats.allocated_bytes[all].current;
    *bytes = static_cast<uint64_t>(allocator->getMemoryInfo(device).first) + static_cast<uint64_t>(idle);
  });
}

}  // extern "C"
