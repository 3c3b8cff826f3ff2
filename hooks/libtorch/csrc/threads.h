// How many threads compute an operation.
#pragma once
#include <ATen/Parallel.h>

namespace ssdtrain {

// The number of threads of the calling thread's operations, while an operation of another number is repeated.
class Threads final {
 public:
  explicit Threads(int threads) : before_(at::get_num_threads()) {
    if (threads != before_) at::set_num_threads(threads);
    is_changed_ = threads != before_;
  }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  ~Threads() {
    if (is_changed_) at::set_num_threads(before_);
  }

 private:
  int before_;
  bool is_changed_ = false;
};

}  // namespace ssdtrain
