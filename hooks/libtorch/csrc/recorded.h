// One operation that has run, with what it takes to run it again.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <vector>

#include "watches.h"

namespace ssdtrain {

using WeakStorage = c10::weak_intrusive_ptr<StorageImpl>;

// How a tensor lies in its storage.
struct View {
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  int64_t offset;
  c10::DimVector sizes;
  c10::DimVector strides;

  explicit View(const at::Tensor& t)
      : keys(t.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA),  // of what is plain
        dtype(t.dtype()),
        offset(t.storage_offset()),
        sizes(t.sizes()),
        strides(t.strides()) {}

  at::Tensor on(c10::Storage storage) const {
    auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, dtype);
    view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return view;
  }

  bool is_of(const at::Tensor& t) const {
    return t.defined() && t.has_storage() && dtype == t.dtype() && offset == t.storage_offset() && sizes == t.sizes() &&
           strides == t.strides();
  }
};

// A storage that an operation read or made, as it was then.
struct Record {
  WeakStorage storage;
  uint64_t bytes;
  uint32_t generation;
  uint32_t version;

  explicit Record(const at::Tensor& t)
      : storage(c10::intrusive_ptr<StorageImpl>::unsafe_reclaim_from_nonowning(t.storage().unsafeGetStorageImpl())),
        bytes(t.storage().nbytes()),
        generation(generation_of(t.storage().unsafeGetStorageImpl())),
        version(t.is_inference() ? 0 : t._version()) {}

  StorageImpl* address() const { return storage._unsafe_get_target(); }
  // An operation that has begun to write may read, and have autograd save, what it has not written yet.
  bool is_unwritten() const { return generation == generation_of(address()) && !is_being_written(address()); }
};

// An argument that is a tensor, or one of a list of them.
struct Operand {
  size_t argument;
  int64_t element;  // -1: the argument itself
  size_t storage;
  View view;
};

// A running statistic that an operation updated. Its results do not depend on what that held, but on its type.
struct Statistic {
  size_t argument;
  View view;
};

// A result of an operation: which of the storages it made, and how the result lies there.
struct Result {
  size_t place;  // among the results
  size_t storage;
  View view;
};

using Records = c10::SmallVector<Record, 2>;

// One operation that has run.
struct Recorded final : c10::intrusive_ptr_target {
  c10::OperatorHandle op;
  uint64_t number = 0;
  uint64_t index = 0;  // among those of its thread
  uint32_t strand = 0;
  // Most operations have no more than this of each, and need no other memory.
  c10::SmallVector<c10::IValue, 5> arguments;  // without the tensors of `operands` and `statistics`
  c10::SmallVector<Operand, 2> operands;
  std::vector<Statistic> statistics;
  Records read;
  c10::SmallVector<Result, 1> results;
  Records made;
  uint64_t flags = 0;
  int threads = 0;
  c10::Device device = c10::kCPU;
  int64_t stream = 0;
  uint64_t begun = 0;
  uint64_t ended = 0;

  explicit Recorded(const c10::OperatorHandle& op) : op(op) {}
};

// The calling thread's operations run as those on record did: below autograd, autocast and everything else above the
// device's kernels.
class Below final {
 public:
  Below()
      : keys_(c10::default_included_set, c10::default_excluded_set | c10::autograd_dispatch_keyset |
                                             c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) |
                                             c10::DispatchKeySet(c10::DispatchKey::Fake)) {}

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
  c10::AutoGradMode no_gradients_{false};
};

}  // namespace ssdtrain
