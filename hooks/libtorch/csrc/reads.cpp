// What a function reads but did not create, and the running statistics that it updates.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "guard.h"
#include "of_thread.h"
#include "operations.h"
#include "watches.h"

using namespace ssdtrain;

// What a function reads but did not create, from `st_reads_begin` to `st_reads_end`, and whether that is still
// unchanged.
struct st_reads {
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  struct Read {
    c10::weak_intrusive_ptr<StorageImpl> storage;
    WeakTensor tensor;
    c10::VariableVersion counter;
    uint32_t version;
    std::vector<Write> writes;  // by then
    Span bytes;                 // what is read of it
    bool changed;  // by the function itself
    bool made;     // by the function, as was seen later: of no interest
    std::string what;
  };
  struct Seen {
    uint64_t when;
    bool made;    // by the function
    size_t read;  // if not: where it is in `reads`
    // Held so that the address identifies one storage.
    c10::weak_intrusive_ptr<StorageImpl> storage;
  };

  // Running statistics that the function updates, and their values before the first update.
  struct Statistic {
    at::Tensor tensor;
    at::Tensor before;
  };

  std::vector<Read> reads;
  std::vector<Statistic> statistics;
  // Something could not be recorded.
  bool has_failed = false;
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
    return c10::weak_intrusive_ptr<StorageImpl>(shared_storage_of(t));
  }

  static bool has_same_elements(const at::Tensor& left, const at::Tensor& right) {
    return storage_of(left) == storage_of(right) && left.storage_offset() == right.storage_offset() &&
           left.scalar_type() == right.scalar_type() && left.sizes() == right.sizes() && left.strides() == right.strides();
  }

  // What is known about the tensor's storage; if it is new, it is recorded as one that the function did not create.
  Seen& see(const at::Tensor& t, uint64_t when) {
    const StorageImpl* storage = storage_of(t);
    const auto known = seen.find(storage);
    if (known != seen.end()) return known->second;
    const c10::VariableVersion& counter = t.unsafeGetTensorImpl()->version_counter();
    const uint32_t version = counter.enabled() ? counter.current_version() : 0;
    std::string what = t.is_nested() ? "a nested tensor" : c10::str("a tensor of shape ", t.sizes());
    reads.push_back(
        Read{weak(t), WeakTensor(t.getIntrusivePtr()), counter, version, {}, Span{SIZE_MAX, 0}, false, false, std::move(what)});
    watch(storage);
    reads.back().writes = writes_of(storage);
    return seen.emplace(storage, Seen{when, false, reads.size() - 1, weak(t)}).first->second;
  }

  void reads_one(const at::Tensor& t, bool only_views, bool changes, uint64_t when) {
    const Seen& known = see(t, when);
    if (known.made) return;
    Read& read = reads[known.read];
    read.changed = read.changed || changes;
    if (!only_views) read.bytes.add(span_of(t));
  }

  // Records a result of a call whose arguments were seen before `when`: what was first seen since then was created by
  // the call.
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
    const at::DisableRecordFunctionGuard unseen;
    const c10::NoGradGuard no_grad;
    // Elements that share one address have one value.
    at::Tensor elements = t;
    for (int64_t i = 0; i < t.dim(); ++i) {
      if (t.stride(i) == 0 && t.size(i) > 1) elements = elements.narrow(i, 0, 1);
    }
    for (const Statistic& one : statistics) {
      if (has_same_elements(one.tensor, elements)) return;
    }
    statistics.push_back(Statistic{elements, elements.detach().clone()});
  }

  // Whether a rerun begins with what these bytes held, whatever has been written to them since: that is so if all of
  // them are statistics.
  bool rewinds(const StorageImpl* storage, Span wanted) const {
    std::vector<Span> spans;
    for (const auto& [t, before] : statistics) {
      if (storage_of(t) == storage && t.is_contiguous()) spans.push_back(span_of(t));
    }
    std::sort(spans.begin(), spans.end(), [](const Span& left, const Span& right) { return left.from < right.from; });
    size_t covered = wanted.from;
    for (const Span& span : spans) {
      if (span.from <= covered) covered = std::max(covered, span.to);
    }
    return !spans.empty() && covered >= std::min(wanted.to, storage->nbytes());
  }

  // Whether the bytes that were read are unchanged, or are values that a rerun begins with.
  bool is_unchanged(const Read& read) const {
    const StorageImpl* storage = read.storage._unsafe_get_target();
    const at::Tensor tensor(read.tensor.lock());
    // A rerun would read from where the tensor has its data now.
    if (tensor.defined() && storage_of(tensor) != storage) return storage_of(tensor) != nullptr && rewinds(storage_of(tensor), Span{});
    if (read.storage.expired() || rewinds(storage, Span{})) return true;
    if (read.counter.enabled() && read.counter.current_version() != read.version) return false;
    const std::vector<Write> writes = writes_of(storage);
    const auto same = [&](const std::vector<Write>& some, const std::vector<Write>& others) {
      return std::all_of(some.begin(), some.end(), [&](const Write& write) {
        const bool is_elsewhere = !(write.where == Span{}) && !write.where.meets(read.bytes);
        return std::find(others.begin(), others.end(), write) != others.end() || is_elsewhere || rewinds(storage, write.where);
      });
    };
    // Writes of a rerun that have been forgotten since are a change as well.
    return same(writes, read.writes) && same(read.writes, writes);
  }
};

namespace {

// What is recorded on a thread.
struct Reading {
  // The functions in progress whose reads are recorded, innermost last.
  std::vector<st_reads*> functions;
  // Makes libtorch call us for them; registered while there are any.
  at::CallbackHandle callback = 0;
  // Calls that were seen while something was being recorded.
  uint64_t calls = 0;

  // What libtorch calls on the thread is made before this, so it is there as long as this is.
  Reading() { at::hasThreadLocalCallbacks(); }
};

struct Call final : at::ObserverContext {
  explicit Call(uint64_t when) : when(when) {}
  uint64_t when;
};

// If `body` fails, marks everything that is being recorded as failed: libtorch only prints what an observer throws.
template <class Body>
void noting(Body&& body) {
  try {
    body();
  } catch (...) {
    for (st_reads* reads : of_thread<Reading>()->functions) reads->has_failed = true;
  }
}

// Called on threads that record what is read, and on threads that took over their settings.
std::unique_ptr<at::ObserverContext> read_starts(const at::RecordFunction& call) {
  Reading* reading = of_thread<Reading>();
  if (reading == nullptr || reading->functions.empty()) return nullptr;
  noting([&] {
    const Operation& operation = known(call);
    const auto arguments = call.inputs();
    const uint64_t statistics = statistics_in(operation, arguments);
    for (size_t i = 0; i < arguments.size(); ++i) {
      const bool updated = (statistics & bit(i)) != 0;
      const bool viewed = (operation.viewed & bit(i)) != 0;
      const bool changed = (operation.written & bit(i)) != 0;
      each_tensor(arguments[i], [&](const at::Tensor& t) {
        for (st_reads* reads : reading->functions) {
          updated ? reads->updates(t) : reads->reads_one(t, viewed, changed, reading->calls);
        }
      });
    }
  });
  return std::make_unique<Call>(++reading->calls);
}

void read_ends(const at::RecordFunction& call, at::ObserverContext* context) {
  Reading* reading = of_thread<Reading>();
  if (context == nullptr || reading == nullptr) return;
  noting([&] {
    for (const c10::IValue& result : call.outputs()) {
      each_tensor(result, [&](const at::Tensor& t) {
        for (st_reads* reads : reading->functions) reads->makes_one(t, static_cast<Call*>(context)->when);
      });
    }
  });
}

// ---- statistics --------------------------------------------------------------------------------------------------------

// Does not raise the version counter, just as an update of statistics does not.
void set_value(const at::Tensor& t, const at::Tensor& value) {
  const at::DisableRecordFunctionGuard unseen;
  written(storage_of(t), span_of(t));
  t.variable_data().copy_(value);
}

// Statistics are rewound by one thread at a time, but each thread computes on a stream of its own: the next one's
// work must come after this.
void each_last_restore(const std::vector<at::Tensor>& tensors, void (*each)(c10::Event& event, const c10::Stream& now)) {
  static auto* events = new std::unordered_map<c10::Device, c10::Event>;
  for (const at::Tensor& t : tensors) {
    if (!t.is_cuda()) continue;
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    each(events->try_emplace(t.device(), c10::DeviceType::CUDA).first->second, guard.getStream(t.device()));
  }
}

}  // namespace

// Running statistics, and the values to restore.
struct st_statistics {
  std::vector<at::Tensor> tensors;
  std::vector<at::Tensor> values;
  TemporaryWrites writes;

  // `rerun` is what was recorded meanwhile, if anything was.
  void put_back(const st_reads* rerun) {
    std::exception_ptr failure;
    const auto set = [&](const at::Tensor& t, const at::Tensor& value) {
      try {
        set_value(t, value);
      } catch (...) {
        failure = std::current_exception();
      }
    };
    bool has_others = false;
    for (size_t i = rerun == nullptr ? 0 : rerun->statistics.size(); i-- > 0;) {
      const auto& [t, before] = rerun->statistics[i];
      const auto is_it = [&t = t](const at::Tensor& known) { return st_reads::has_same_elements(known, t); };
      if (std::any_of(tensors.begin(), tensors.end(), is_it)) continue;
      has_others = true;
      set(t, before);
    }
    for (size_t i = 0; i < values.size(); ++i) set(tensors[i], values[i]);
    each_last_restore(tensors, [](c10::Event& event, const c10::Stream& now) { event.record(now); });
    const bool alone = writes.forget();
    if (failure) std::rethrow_exception(failure);
    TORCH_CHECK(!has_others, "it updates other running statistics of batch normalisation than before");
    TORCH_CHECK(alone, "another thread has updated running statistics of batch normalisation meanwhile, which the rerun updates too. Let "
                "one thread at a time have them");
  }
};

bool ssdtrain::is_noting_reads() {
  const Reading* reading = of_thread<Reading>();
  return reading != nullptr && !reading->functions.empty();
}

extern "C" {

st_status st_reads_begin(st_reads** out) {
  return ssdtrain::guarded([&] {
    Reading* reading = of_thread<Reading>();
    TORCH_CHECK(reading != nullptr, "the thread ends, and what it reads cannot be noted any more");
    auto reads = std::make_unique<st_reads>();
    reading->functions.reserve(reading->functions.size() + 1);
    if (reading->functions.empty()) {
      at::RecordFunctionCallback callback(read_starts, read_ends);
      reading->callback = at::addThreadLocalCallback(of_operations(callback.needsOutputs(true)));
    }
    reading->functions.push_back(reads.get());
    *out = reads.release();
  });
}

void st_reads_end(st_reads* reads) {
  if (Reading* reading = of_thread<Reading>()) {
    auto& functions = reading->functions;
    functions.erase(std::remove(functions.begin(), functions.end(), reads), functions.end());
    if (functions.empty()) at::removeCallback(reading->callback);
  }
  reads->seen.clear();
}

st_status st_reads_check_unchanged_within(const st_reads* reads) {
  return ssdtrain::guarded([&] {
    TORCH_CHECK(!reads->has_failed, "something that cannot be noted");
    for (const auto& read : reads->reads) {
      TORCH_CHECK(!read.changed || read.made || read.storage.expired(), read.what, " that it did not make");
    }
  });
}

st_status st_reads_check_unchanged_since(const st_reads* reads) {
  return ssdtrain::guarded([&] {
    for (const auto& read : reads->reads) {
      TORCH_CHECK(read.made || reads->is_unchanged(read), read.what);
    }
  });
}

void st_reads_free(st_reads* reads) { delete reads; }

bool st_reads_contain(const st_reads* reads, const st_storage* storage) {
  const auto* impl = reinterpret_cast<const StorageImpl*>(storage);
  const auto& statistics = reads->statistics;
  return std::any_of(reads->reads.begin(), reads->reads.end(),
                     [&](const auto& read) { return !read.made && read.storage._unsafe_get_target() == impl; }) ||
         std::any_of(statistics.begin(), statistics.end(), [&](const auto& one) { return storage_of(one.tensor) == impl; });
}

bool st_reads_noted(const st_storage* storage) {
  const Reading* reading = of_thread<Reading>();
  if (reading == nullptr || reading->functions.empty()) return false;
  const auto& seen = reading->functions.front()->seen;
  const auto known = seen.find(reinterpret_cast<const StorageImpl*>(storage));
  return known != seen.end() && !known->second.made;
}

bool st_reads_update_statistics(const st_reads* reads) { return !reads->statistics.empty(); }

st_status st_statistics_rewind(const st_reads* reads, st_statistics** out) {
  return ssdtrain::guarded([&] {
    const c10::NoGradGuard no_grad;
    auto rewound = std::make_unique<st_statistics>();
    for (const auto& known : reads->statistics) rewound->tensors.push_back(known.tensor);
    each_last_restore(rewound->tensors, [](c10::Event& event, const c10::Stream& now) { event.block(now); });
    for (const at::Tensor& t : rewound->tensors) {
      rewound->writes.add(t.storage());
      rewound->values.push_back(t.detach().clone());
    }
    try {
      // Where they overlap, the older value is that of the bytes beneath.
      for (size_t i = reads->statistics.size(); i-- > 0;) set_value(reads->statistics[i].tensor, reads->statistics[i].before);
    } catch (...) {
      rewound->put_back(nullptr);
      throw;
    }
    *out = rewound.release();
  });
}

st_status st_statistics_restore(st_statistics* rewound, const st_reads* rerun) {
  return ssdtrain::guarded([&] {
    const std::unique_ptr<st_statistics> owned(rewound);
    const c10::NoGradGuard no_grad;
    owned->put_back(rerun);
  });
}

}  // extern "C"
