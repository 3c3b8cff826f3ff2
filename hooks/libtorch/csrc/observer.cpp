// What operations write and read, as libtorch's own observers of operations tell it (ATen/record_function.h): above autograd, on every
// thread, composite operations and those within them. Version counters see less: pieces of a storage have counters of their own,
// and so has what `Tensor::data` returns.
//
// What is written is told by the aliases in an operation's schema. What a kernel writes of which its schema says nothing is in the
// list `statistics_of`. Writes through raw pointers are seen by nobody.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "guard.h"

namespace {

using c10::StorageImpl;

// ---- storages that someone watches -------------------------------------------------------------------------------------

// Most writes are to storages that nobody watches: these counters, by a hash of the address, say so without a lock.
constexpr size_t kCounters = 1 << 14;
std::array<std::atomic<uint32_t>, kCounters> watchers_of;

std::atomic<uint32_t>& counter_of(const StorageImpl* storage) {
  return watchers_of[(reinterpret_cast<uintptr_t>(storage) * 0x9e3779b97f4a7c15) >> 50];
}

// How often a storage was written since it is watched, and by how many it is.
struct Watched {
  uint32_t watchers = 0;
  uint32_t writes = 0;
};

struct Watches {
  std::mutex mutex;
  std::unordered_map<const StorageImpl*, Watched> storages;
};

// Never destroyed: tensors in statics may outlive every destructor.
Watches& watches() {
  static Watches* instance = new Watches;
  return *instance;
}

void (*tell_written)(const st_storage* storage) = nullptr;

// How often storages were written, of those whose values this thread will put back.
using Writes = std::unordered_map<const StorageImpl*, uint32_t>;
thread_local std::vector<Writes*> undone;

uint32_t watch(const StorageImpl* storage) {
  std::lock_guard lock(watches().mutex);
  Watched& watched = watches().storages[storage];
  ++watched.watchers;
  counter_of(storage).fetch_add(1);
  return watched.writes;
}

void unwatch(const StorageImpl* storage) {
  std::lock_guard lock(watches().mutex);
  const auto place = watches().storages.find(storage);
  if (place == watches().storages.end()) return;
  counter_of(storage).fetch_sub(1);
  if (--place->second.watchers == 0) watches().storages.erase(place);
}

// Takes back that it was written so often.
void unwrite(const StorageImpl* storage, uint32_t writes) {
  std::lock_guard lock(watches().mutex);
  const auto place = watches().storages.find(storage);
  if (place != watches().storages.end()) place->second.writes -= writes;
}

uint32_t writes_of(const StorageImpl* storage) {
  std::lock_guard lock(watches().mutex);
  const auto place = watches().storages.find(storage);
  return place == watches().storages.end() ? 0 : place->second.writes;
}

void written(const StorageImpl* storage) {
  if (counter_of(storage).load() == 0) return;
  {
    std::lock_guard lock(watches().mutex);
    const auto place = watches().storages.find(storage);
    if (place == watches().storages.end()) return;
    ++place->second.writes;
  }
  for (Writes* writes : undone) {
    const auto place = writes->find(storage);
    if (place != writes->end()) ++place->second;
  }
  tell_written(reinterpret_cast<const st_storage*>(storage));
}

// ---- operations --------------------------------------------------------------------------------------------------------

// What is known of an operation by its schema; arguments as bits.
struct Operation {
  const char* name = nullptr;
  uint64_t written = 0;
  // Of these: written after autograd may have saved them as they were. An in-place operation's own tensor is not among them, since it is
  // saved when it has been changed.
  uint64_t written_after_saving = 0;
  // Running statistics, which a kernel updates and its result does not depend on, unless the argument `training` is false.
  uint64_t statistics = 0;
  size_t training = 0;
};

constexpr uint64_t bit(size_t argument) { return argument < 64 ? uint64_t{1} << argument : 0; }

// Of batch normalisation, most of whose schemas do not say that they write.
void statistics_of(std::string_view name, Operation& of) {
  struct Known {
    std::string_view name;
    size_t mean;
    size_t training;
  };
  constexpr size_t kAlways = 0;
  static constexpr Known known[] = {
      {"aten::batch_norm", 3, 5},          {"aten::_batch_norm_impl_index", 3, 5},
      {"aten::native_batch_norm", 3, 5},   {"aten::cudnn_batch_norm", 3, 5},
      {"aten::miopen_batch_norm", 3, 5},   {"aten::_native_batch_norm_legit", 3, 5},
      {"aten::_batch_norm_with_update", 3, kAlways}, {"aten::batch_norm_update_stats", 1, kAlways},
      {"aten::batch_norm_gather_stats", 3, kAlways}, {"aten::batch_norm_gather_stats_with_counts", 3, kAlways},
  };
  for (const Known& one : known) {
    if (one.name != name) continue;
    of.statistics = bit(one.mean) | bit(one.mean + 1);
    of.training = one.training;
  }
}

Operation operation_of(const at::RecordFunction& call) {
  Operation of;
  of.name = call.name();
  const auto schema = call.operator_schema();
  if (!schema.has_value()) return of;
  const std::string& name = schema->name();
  // Shape only, or whether gradients are wanted: no byte changes.
  static constexpr std::string_view harmless[] = {"aten::requires_grad_", "aten::retain_grad", "aten::set_data"};
  for (const std::string_view one : harmless) {
    if (name == one) return of;
  }
  const auto handle = c10::Dispatcher::singleton().findSchema(schema->operator_name());
  const bool resizes = name.rfind("aten::resize_", 0) == 0;
  if (handle.has_value() && handle->hasTag(at::Tag::inplace_view) && !resizes) return of;
  const bool in_place = name.back() == '_';
  const auto& arguments = schema->arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    of.written |= bit(i);
    if (!in_place || i > 0) of.written_after_saving |= bit(i);
  }
  statistics_of(name, of);
  return of;
}

// A schema's name is at an address of its own for as long as the process lives.
const Operation& known(const at::RecordFunction& call) {
  constexpr size_t kSlots = 1024;
  thread_local std::unique_ptr<std::array<Operation, kSlots>> cache = std::make_unique<std::array<Operation, kSlots>>();
  const char* name = call.name();
  Operation& slot = (*cache)[(reinterpret_cast<uintptr_t>(name) >> 4) % kSlots];
  if (slot.name != name) slot = operation_of(call);
  return slot;
}

// The tensors with storage of an argument or a result.
template <class Each>
void each_tensor(const c10::IValue& argument, const Each& each) {
  const auto of = [&](const at::Tensor& t) {
    if (t.defined() && t.has_storage()) each(t);
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

StorageImpl* storage_of(const at::Tensor& t) { return t.storage().unsafeGetStorageImpl(); }

// The arguments of a call that it updates as running statistics.
uint64_t statistics_in(const Operation& operation, c10::ArrayRef<const c10::IValue> arguments) {
  if (operation.statistics == 0 || operation.training == 0) return operation.statistics;
  const bool told = operation.training < arguments.size() && arguments[operation.training].isBool();
  return told && !arguments[operation.training].toBool() ? 0 : operation.statistics;
}

// ---- what is read while a function runs --------------------------------------------------------------------------------

}  // namespace

// What a function reads that it did not make, from `st_reads_begin` to `st_reads_end`, and whether that is still what it was.
struct st_reads {
  struct Read {
    c10::weak_intrusive_ptr<StorageImpl> storage;
    c10::VariableVersion counter;
    uint32_t version;
    uint32_t writes;
    bool changed;  // by the function itself
    bool made;     // by the function, as was seen later: of no interest
    std::string shape;
  };
  struct Seen {
    uint64_t when;
    bool made;    // by the function
    size_t read;  // if not: where it is in `reads`
    // Held so that the address means one storage.
    c10::weak_intrusive_ptr<StorageImpl> storage;
  };

  // Running statistics that the function updates, and their values before it did so first.
  struct Statistic {
    at::Tensor tensor;
    at::Tensor before;
  };

  std::vector<Read> reads;
  std::vector<Statistic> statistics;
  std::unordered_map<const StorageImpl*, Seen> seen;

  st_reads() = default;
  st_reads(const st_reads&) = delete;
  st_reads& operator=(const st_reads&) = delete;
  ~st_reads() {
    for (const Read& read : reads) {
      if (!read.made) unwatch(read.storage._unsafe_get_target());
    }
  }

  static c10::weak_intrusive_ptr<StorageImpl> weak(const at::Tensor& t) {
    return c10::weak_intrusive_ptr<StorageImpl>(t.storage().getWeakStorageImpl());
  }

  void reads_one(const at::Tensor& t, bool changes, uint64_t when) {
    const StorageImpl* storage = storage_of(t);
    const auto [place, fresh] = seen.try_emplace(storage, Seen{when, false, reads.size(), weak(t)});
    if (fresh) {
      const c10::VariableVersion& counter = t.unsafeGetTensorImpl()->version_counter();
      const uint32_t version = counter.enabled() ? counter.current_version() : 0;
      reads.push_back(Read{weak(t), counter, version, watch(storage), false, false, c10::str(t.sizes())});
    }
    if (changes && !place->second.made) reads[place->second.read].changed = true;
  }

  // A result of a call whose arguments were seen before `when`: what was first seen since then was made by it.
  void makes_one(const at::Tensor& t, uint64_t when) {
    const auto [place, fresh] = seen.try_emplace(storage_of(t), Seen{when, true, 0, weak(t)});
    Seen& known = place->second;
    if (fresh || known.made || known.when < when) return;
    known.made = true;
    reads[known.read].made = true;
    unwatch(storage_of(t));
  }

  void updates(const at::Tensor& t) {
    const auto known = seen.find(storage_of(t));
    if (known != seen.end() && known->second.made) return;
    for (const Statistic& one : statistics) {
      // Others may lie in the same storage.
      if (one.tensor.is_alias_of(t) && one.tensor.const_data_ptr() == t.const_data_ptr() && one.tensor.sizes() == t.sizes()) return;
    }
    const at::DisableRecordFunctionGuard unseen;
    const c10::NoGradGuard no_grad;
    statistics.push_back(Statistic{t, t.detach().clone()});
  }

  // A rerun begins with what such a storage held, whatever has been written to it since: statistics are all of it.
  bool is_rewound(const StorageImpl* storage) const {
    std::vector<std::pair<size_t, size_t>> ranges;
    for (const auto& [t, before] : statistics) {
      const size_t start = t.storage_offset() * t.itemsize();
      if (storage_of(t) == storage && t.is_contiguous()) ranges.emplace_back(start, start + t.nbytes());
    }
    std::sort(ranges.begin(), ranges.end());
    size_t end = 0;
    for (const auto& [from, to] : ranges) {
      if (from > end) return false;
      end = std::max(end, to);
    }
    return !ranges.empty() && end >= storage->nbytes();
  }
};

namespace {

// The functions under way on this thread whose reads are noted, innermost last.
thread_local std::vector<st_reads*> reading;
// Tells libtorch to call for them; there while there are any.
thread_local at::CallbackHandle reading_callback = 0;
// Calls of this thread that were seen while something was noted.
thread_local uint64_t calls = 0;

// Kept from the start of a call to its end.
struct Later final : at::ObserverContext {
  std::vector<c10::Storage> storages;
};

struct Call final : at::ObserverContext {
  explicit Call(uint64_t when) : when(when) {}
  uint64_t when;
};

std::unique_ptr<at::ObserverContext> call_starts(const at::RecordFunction& call) {
  const Operation& operation = known(call);
  if ((operation.written | operation.statistics) == 0) return nullptr;
  const auto arguments = call.inputs();
  const uint64_t statistics = statistics_in(operation, arguments);
  std::unique_ptr<Later> later;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (((operation.written | statistics) & bit(i)) == 0) continue;
    const bool again = ((operation.written_after_saving | statistics) & bit(i)) != 0;
    each_tensor(arguments[i], [&](const at::Tensor& t) {
      written(storage_of(t));
      if (!again) return;
      if (later == nullptr) later = std::make_unique<Later>();
      later->storages.push_back(t.storage());
    });
  }
  return later;
}

void call_ends(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  for (const c10::Storage& storage : static_cast<Later*>(context)->storages) written(storage.unsafeGetStorageImpl());
}

// Called on threads that note what is read, and on those that took their settings over.
std::unique_ptr<at::ObserverContext> read_starts(const at::RecordFunction& call) {
  if (reading.empty()) return nullptr;
  const Operation& operation = known(call);
  const auto arguments = call.inputs();
  const uint64_t statistics = statistics_in(operation, arguments);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool updated = (statistics & bit(i)) != 0;
    const bool changed = (operation.written & bit(i)) != 0;
    each_tensor(arguments[i], [&](const at::Tensor& t) {
      for (st_reads* reads : reading) updated ? reads->updates(t) : reads->reads_one(t, changed, calls);
    });
  }
  return std::make_unique<Call>(++calls);
}

void read_ends(const at::RecordFunction& call, at::ObserverContext* context) {
  if (context == nullptr) return;
  for (const c10::IValue& result : call.outputs()) {
    each_tensor(result, [&](const at::Tensor& t) {
      for (st_reads* reads : reading) reads->makes_one(t, static_cast<Call*>(context)->when);
    });
  }
}

at::RecordFunctionCallback of_operations(at::RecordFunctionCallback callback) {
  return callback.needsInputs(true).scopes({at::RecordScope::FUNCTION});
}

}  // namespace

// Values of running statistics, to be put back, and how often the thread has written to them meanwhile.
struct st_statistics {
  std::vector<std::pair<at::Tensor, at::Tensor>> values;
  Writes writes;

  st_statistics() = default;
  st_statistics(const st_statistics&) = delete;
  st_statistics& operator=(const st_statistics&) = delete;
  ~st_statistics() { undone.erase(std::remove(undone.begin(), undone.end(), &writes), undone.end()); }
};

namespace {

// Without raising the version: an update of statistics does not raise it either.
void set_value(const at::Tensor& t, const at::Tensor& value) { t.variable_data().copy_(value); }

}  // namespace

extern "C" {

st_status st_writes_observe(void (*tell)(const st_storage* storage)) {
  return ssdtrain::guarded([&] {
    static std::once_flag once;
    std::call_once(once, [&] {
      tell_written = tell;
      at::addGlobalCallback(of_operations(at::RecordFunctionCallback(call_starts, call_ends)));
    });
  });
}

uint32_t st_storage_watch(const st_storage* storage) { return watch(reinterpret_cast<const StorageImpl*>(storage)); }
void st_storage_unwatch(const st_storage* storage) { unwatch(reinterpret_cast<const StorageImpl*>(storage)); }
uint32_t st_storage_writes(const st_storage* storage) { return writes_of(reinterpret_cast<const StorageImpl*>(storage)); }

st_status st_reads_begin(st_reads** out) {
  return ssdtrain::guarded([&] {
    auto reads = std::make_unique<st_reads>();
    reading.reserve(reading.size() + 1);
    if (reading.empty()) {
      at::RecordFunctionCallback callback(read_starts, read_ends);
      reading_callback = at::addThreadLocalCallback(of_operations(callback.needsOutputs(true)));
    }
    reading.push_back(reads.get());
    *out = reads.release();
  });
}

void st_reads_end(st_reads* reads) {
  reading.erase(std::remove(reading.begin(), reading.end(), reads), reading.end());
  if (reading.empty()) at::removeCallback(reading_callback);
  reads->seen.clear();
}

st_status st_reads_check_unchanged_within(const st_reads* reads) {
  return ssdtrain::guarded([&] {
    for (const auto& read : reads->reads) {
      TORCH_CHECK(!read.changed || read.made || read.storage.expired(), "a tensor of shape ", read.shape,
                  " that it did not make");
    }
  });
}

st_status st_reads_check_unchanged_since(const st_reads* reads) {
  return ssdtrain::guarded([&] {
    for (const auto& read : reads->reads) {
      if (read.made || read.storage.expired() || reads->is_rewound(read.storage._unsafe_get_target())) continue;
      const bool same = (!read.counter.enabled() || read.counter.current_version() == read.version) &&
                        writes_of(read.storage._unsafe_get_target()) == read.writes;
      TORCH_CHECK(same, "a tensor of shape ", read.shape);
    }
  });
}

void st_reads_free(st_reads* reads) { delete reads; }

st_status st_statistics_rewind(const st_reads* reads, st_statistics** out) {
  return ssdtrain::guarded([&] {
    const c10::NoGradGuard no_grad;
    auto rewound = std::make_unique<st_statistics>();
    for (const auto& known : reads->statistics) {
      rewound->values.emplace_back(known.tensor, known.tensor.detach().clone());
      rewound->writes.emplace(storage_of(known.tensor), 0);
    }
    undone.push_back(&rewound->writes);
    for (const auto& known : reads->statistics) set_value(known.tensor, known.before);
    *out = rewound.release();
  });
}

st_status st_statistics_restore(st_statistics* rewound) {
  return ssdtrain::guarded([&] {
    const std::unique_ptr<st_statistics> owned(rewound);
    const c10::NoGradGuard no_grad;
    for (const auto& [t, value] : owned->values) set_value(t, value);
    // They hold what they held: no one needs to know that it was something else in between.
    for (const auto& [storage, writes] : owned->writes) unwrite(storage, writes);
  });
}

}  // extern "C"
