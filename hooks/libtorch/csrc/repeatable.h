// Which operations give the same bits when they are run again with the same arguments.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

namespace ssdtrain {

// What is known of an operator.
struct Repeatable {
  const c10::FunctionSchema* schema = nullptr;
  bool is_certain = false;
  // It depends on global flags, such as whether TF32 may be used.
  bool by_flags = false;
  // On a GPU, cuDNN may time several algorithms for it, and take another one the next time, if it is asked to.
  bool by_benchmark = false;
  // Only so many of its results: the others may have bytes that nobody has written.
  size_t results = SIZE_MAX;
  // Its result is random unless this argument is zero.
  size_t dropout = SIZE_MAX;
  // Running statistics: this argument and the next. The one after them says whether it is training; then they are only
  // written, and it is repeated with others.
  size_t statistics = SIZE_MAX;
};

// Operators that are not known to be repeatable, that write to an argument or that draw random numbers are not.
const Repeatable& repeatable(const c10::OperatorHandle& op);

}  // namespace ssdtrain
