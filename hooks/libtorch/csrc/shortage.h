// Memory that runs out: whoever can do without some of it is asked before an allocation fails.
#pragma once
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <limits>

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

// Whether the calling thread's allocations ask for memory. Otherwise they fail at once.
bool asks() noexcept;

// What is to be allocated of a device at most. An allocation that exceeds it asks for memory first, and then goes on.
class Ceiling {
 public:
  void set(uint64_t most) {
    // Another one that comes or goes does not lower what this one was raised to.
    if (told_.exchange(most) != most) most_.store(most);
  }

  bool is_set() const { return most_.load(std::memory_order_relaxed) != kNone; }
  uint64_t asked() const { return asked_.load(); }

  // Whether an allocation of `bytes` may be made, where `allocated()` bytes are by now.
  template <class Allocated>
  bool admits(c10::Device device, uint64_t bytes, Allocated&& allocated) {
    uint64_t most = most_.load(std::memory_order_relaxed);
    uint64_t then = allocated() + bytes;
    if (then <= most) return true;
    if (!asks()) return false;
    asked_.fetch_add(1);
    // What is freed may be used again by others at once.
    constexpr int kMost = 64;
    for (int tries = 0; then > most && tries < kMost && relieved(device, then - most) > 0; ++tries) {
      then = allocated() + bytes;
      most = most_.load(std::memory_order_relaxed);
    }
    return true;
  }

  // So many bytes are allocated now. If that could not be averted, none asks until as much and a quarter of the excess is
  // exceeded.
  void reached(uint64_t now) {
    uint64_t most = most_.load(std::memory_order_relaxed);
    const uint64_t told = told_.load();
    if (now > most && now > told) most_.compare_exchange_strong(most, now + (now - told) / 4);
  }

 private:
  static constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();
  std::atomic<uint64_t> told_{kNone};
  std::atomic<uint64_t> most_{kNone};
  std::atomic<uint64_t> asked_{0};
};

// That of a device: the CPU, or one for CUDA.
Ceiling& ceiling_of(c10::Device device);

}  // namespace ssdtrain
