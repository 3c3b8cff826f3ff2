// What a thread has looked up lately.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace ssdtrain {

// The calling thread's slot for what belongs to an address whose lowest bits say nothing. Whether that is what is in it,
// the caller sees. When a thread ends, other destructors of it may still ask after the slots are gone.
template <class T>
T& slot_of(const void* address, unsigned low_bits) {
  static_assert(std::is_trivially_destructible_v<T>);
  using Slots = std::array<T, 1024>;
  thread_local Slots* slots = nullptr;
  thread_local bool ends = false;
  thread_local T only;
  struct Owner {
    ~Owner() {
      ends = true;
      delete std::exchange(slots, nullptr);
    }
  };
  if (slots == nullptr) {
    only = T{};
    if (ends) return only;
    thread_local const Owner owner;
    slots = new Slots;
  }
  return (*slots)[(reinterpret_cast<uintptr_t>(address) >> low_bits) % slots->size()];
}

}  // namespace ssdtrain
