// What a process that is forked off needs of libtorch, and other threads hold for a while.
#pragma once
#include <mutex>

namespace ssdtrain {

// Held while libtorch's table of operators is read or changed. libtorch counts who reads it, and a process that ends
// waits, before it takes its operators off the table, until nobody does: one that was forked off, for threads that it
// does not have.
std::mutex& operators_lock();

// Those of the CPU allocator.
void lock_allocator();
void unlock_allocator();

}  // namespace ssdtrain
