// Locks of the process, which the thread that forks holds across the fork: the child has no other thread that could
// give them back.
#include "forks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/record_function.h>

#include "shim.h"
#include "watches.h"

namespace ssdtrain {

namespace {

// libtorch's own. An operation that draws random numbers holds it until it has drawn all of them.
std::mutex& generator_lock() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  return generator.mutex();
}

}  // namespace

std::mutex& operators_lock() {
  static std::mutex* instance = new std::mutex;
  return *instance;
}

}  // namespace ssdtrain

using namespace ssdtrain;

extern "C" {

void st_fork_begins(void) {
  // The first operation of a thread copies libtorch's list of observers, under a lock that cannot be reached from here.
  // This thread, the child's only one, has copied it then.
  (void)at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  // First, since operations that draw may allocate, and write.
  generator_lock().lock();
  operators_lock().lock();
  lock_watches();
  lock_allocator();
}

void st_fork_is_child(void) { forget_updates(); }

void st_fork_ends(void) {
  unlock_allocator();
  unlock_watches();
  operators_lock().unlock();
  generator_lock().unlock();
}

}  // extern "C"
