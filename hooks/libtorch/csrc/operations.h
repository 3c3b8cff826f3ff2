// What is known of the operations that libtorch tells its observers of (ATen/record_function.h).
//
// What is written is told by the aliases in an operation's schema. What a kernel writes of which its schema says nothing is in the
// list `statistics_of`. Writes through raw pointers are seen by nobody.
#pragma once
#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "watches.h"

namespace ssdtrain {

// What is known of an operation by its schema; arguments as bits.
struct Operation {
  const char* name = nullptr;
  uint64_t written = 0;
  // Of these a result is a view. Where it is a copy, an operation within makes it, and reads them.
  uint64_t viewed = 0;
  // Of these: written after autograd may have saved them as they were. An in-place operation's own tensor is not among them, since it is
  // saved when it has been changed.
  uint64_t written_after_saving = 0;
  // Running statistics, which a kernel updates and its result does not depend on, unless the argument `training` is false.
  uint64_t statistics = 0;
  size_t training = 0;
  // It returns before that if its first argument is an empty batch.
  bool passes_over_empty = false;
};

constexpr uint64_t bit(size_t argument) { return argument < 64 ? uint64_t{1} << argument : 0; }

// Whether the calling thread notes what operations read (reads.cpp).
bool is_noting_reads();

const Operation& known(const at::RecordFunction& call);

// The arguments of a call that it updates as running statistics.
uint64_t statistics_in(const Operation& operation, c10::ArrayRef<const c10::IValue> arguments);

// Those of them that it will write.
uint64_t statistics_written_in(const Operation& operation, c10::ArrayRef<const c10::IValue> arguments);

// What holds a tensor's elements, or the values of a sparse one; null if nothing does.
c10::StorageImpl* storage_of(const at::Tensor& t);
c10::intrusive_ptr<c10::StorageImpl> shared_storage_of(const at::Tensor& t);
Span span_of(const at::Tensor& t);

// The tensors with storage of an argument or a result.
template <class Each>
void each_tensor(const c10::IValue& argument, const Each& each) {
  const auto of = [&](const at::Tensor& t) {
    if (storage_of(t) != nullptr) each(t);
  };
  if (argument.isTensor()) {
    of(argument.toTensor());
  } else if (argument.isTensorList()) {
    for (const at::Tensor& t : argument.toTensorVector()) of(t);
  } else if (argument.isList()) {
    for (const c10::IValue& one : argument.toListRef()) {
      if (one.isTensor()) of(one.toTensor());
    }
  }
}

inline at::RecordFunctionCallback of_operations(at::RecordFunctionCallback callback) {
  return callback.needsInputs(true).scopes({at::RecordScope::FUNCTION});
}

}  // namespace ssdtrain
