// What is known about the operations that libtorch reports to its observers (ATen/record_function.h).
//
// Writes are taken from the alias annotations in an operation's schema. Writes of kernels whose schemas do not
// mention them are listed in `statistics_of`. Writes through raw pointers are not seen by anybody.
#pragma once
#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "watches.h"

namespace ssdtrain {

// What an operation's schema says about it; arguments are represented as bits.
struct Operation {
  const char* name = nullptr;
  uint64_t written = 0;
  // Arguments that a result is a view of. If the result is a copy instead, an inner operation makes that copy, and
  // reads them.
  uint64_t viewed = 0;
  // Those of the written arguments that are written after autograd may have saved them unchanged. An in-place
  // operation's own tensor is not among them, since it is saved after it has been changed.
  uint64_t written_after_saving = 0;
  // Running statistics, which a kernel updates and its result does not depend on, unless the argument `training` is
  // false.
  uint64_t statistics = 0;
  size_t training = 0;
  // The operation returns before updating them if its first argument is an empty batch.
  bool passes_over_empty = false;
};

constexpr uint64_t bit(size_t argument) { return argument < 64 ? uint64_t{1} << argument : 0; }

// Whether the calling thread records what operations read (reads.cpp).
bool is_noting_reads();

const Operation& known(const at::RecordFunction& call);

// The arguments of a call that are passed as running statistics to update.
uint64_t statistics_in(const Operation& operation, c10::ArrayRef<const c10::IValue> arguments);

// Those of them that the call will actually write.
uint64_t statistics_written_in(const Operation& operation, c10::ArrayRef<const c10::IValue> arguments);

// The storage that holds a tensor's elements, or the values of a sparse tensor; null if there is none.
c10::StorageImpl* storage_of(const at::Tensor& t);
c10::intrusive_ptr<c10::StorageImpl> shared_storage_of(const at::Tensor& t);
Span span_of(const at::Tensor& t);

// Calls `each` for the tensors with storage in an argument or a result.
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
