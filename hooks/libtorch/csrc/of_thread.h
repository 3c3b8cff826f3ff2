// What a thread has of its own.
#pragma once

namespace ssdtrain {

// The calling thread's value of this type. When a thread ends, other destructors of it may still ask after the value is gone: then null.
template <class T>
T* of_thread() {
  thread_local bool ends = false;
  struct Owner {
    T value;
    ~Owner() { ends = true; }
  };
  if (ends) return nullptr;
  thread_local Owner owner;
  return &owner.value;
}

}  // namespace ssdtrain
