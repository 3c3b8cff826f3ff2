// Segments of libtorch's caching allocator for CUDA: reported when they come, and before they go.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "guard.h"

namespace {

using c10::CachingDeviceAllocator::TraceEntry;

// Segments that can grow are left out: the allocator reports their pages only after they have been unmapped.
void tell(st_segments watcher, const void* context, const TraceEntry& entry) {
  const auto device = static_cast<int8_t>(entry.device_);
  if (entry.action_ == TraceEntry::SEGMENT_ALLOC) {
    watcher.came(context, device, entry.addr_, entry.size_);
  } else if (entry.action_ == TraceEntry::SEGMENT_FREE) {
    watcher.goes(context, device, entry.addr_);
  }
}

}  // namespace

extern "C" {

st_status st_segments_watch(st_segments watcher, const void* context) {
  return ssdtrain::guarded([=] {
    auto* allocator = static_cast<c10::cuda::CUDACachingAllocator::CUDAAllocator*>(
        c10::getDeviceAllocator(c10::DeviceType::CUDA));
    allocator->attachAllocatorTraceTracker([=](const TraceEntry& entry) { tell(watcher, context, entry); });
    for (const auto& segment : allocator->snapshot({0, 0}, /*include_traces=*/false).segments) {
      if (!segment.is_expandable) {
        watcher.was(context, static_cast<int8_t>(segment.device), segment.address, segment.total_size);
      }
    }
  });
}

}  // extern "C"
