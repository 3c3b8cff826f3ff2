// Memory that runs out: whoever can do without some of it is asked before an allocation fails.
#pragma once
#include <c10/core/Device.h>

#include <cstdint>

namespace ssdtrain {

// Has so many bytes of the device's memory freed. Returns how many were, or may have been by other threads. Must be
// called without an allocator's lock.
uint64_t relieved(c10::Device device, uint64_t bytes) noexcept;

// An allocation on the calling thread, for as long as it fails.
class Shortage {
 public:
  Shortage(c10::Device device, uint64_t bytes) : device_(device), wanted_(bytes) {}

  // Has memory freed; false if trying again is of no use. If as much became free as was wanted, and the allocation has
  // failed nevertheless, it lies in pieces that are too small: the next time, twice as much is wanted.
  bool try_again() noexcept;

 private:
  const c10::Device device_;
  uint64_t wanted_;
  uint64_t freed_ = 0;
  int tries_ = 0;
};

}  // namespace ssdtrain
