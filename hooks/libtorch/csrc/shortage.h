// Memory that runs out: whoever can do without some of it is asked before an allocation fails.
#pragma once
#include <c10/core/Device.h>

#include <cstdint>

namespace ssdtrain {

// An allocation of `bytes` bytes has failed on the calling thread. Returns whether any memory of the device was freed,
// so that trying again is worth it. Must be called without an allocator's lock.
bool relieved(c10::Device device, uint64_t bytes) noexcept;

}  // namespace ssdtrain
