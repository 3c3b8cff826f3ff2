// What a function reads that it did not make, and the running statistics that it updates.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "guard.h"
#include "operations.h"
#include "watches.h"

using namespace ssdtrain;

// What a function reads that it did not make, from `st_reads_begin` to `st_reads_end`, and whether that is still what it was.
struct st_reads {
  struct Read {
    c10::weak_intrusive_ptr<StorageImpl> storage;
    c10::VariableVersion counter;
    uint32_t version;
    std::vector<Write> writes;  // by then
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
      watch(storage);
      reads.push_back(Read{weak(t), counter, version, writes_of(storage), false, false, c10::str(t.sizes())});
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
      // Others may lie in the same storage, or begin at the same place.
      const at::Tensor& other = one.tensor;
      const bool same_place = storage_of(other) == storage_of(t) && other.storage_offset() == t.storage_offset();
      if (same_place && other.scalar_type() == t.scalar_type() && other.sizes() == t.sizes() && other.strides() == t.strides()) return;
    }
    const at::DisableRecordFunctionGuard unseen;
    const c10::NoGradGuard no_grad;
    statistics.push_back(Statistic{t, t.detach().clone()});
  }

  // A rerun begins with what these bytes held, whatever has been written to them since: all of them are statistics.
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

  // What is read of it is what was read, or the values that a rerun begins with.
  bool is_unchanged(const Read& read) const {
    const StorageImpl* storage = read.storage._unsafe_get_target();
    if (rewinds(storage, Span{})) return true;
    if (read.counter.enabled() && read.counter.current_version() != read.version) return false;
    const std::vector<Write> writes = writes_of(storage);
    const auto same = [&](const std::vector<Write>& some, const std::vector<Write>& others) {
      return std::all_of(some.begin(), some.end(), [&](const Write& write) {
        return std::find(others.begin(), others.end(), write) != others.end() || rewinds(storage, write.where);
      });
    };
    // Writes of a rerun that are forgotten since are a change as well.
    return same(writes, read.writes) && same(read.writes, writes);
  }
};

namespace {

// The functions under way on this thread whose reads are noted, innermost last.
thread_local std::vector<st_reads*> reading;
// Tells libtorch to call for them; there while there are any.
thread_local at::CallbackHandle reading_callback = 0;
// Calls of this thread that were seen while something was noted.
thread_local uint64_t calls = 0;

struct Call final : at::ObserverContext {
  explicit Call(uint64_t when) : when(when) {}
  uint64_t when;
};

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

// Without raising the version: an update of statistics does not raise it either.
void set_value(const at::Tensor& t, const at::Tensor& value) { t.variable_data().copy_(value); }

// Statistics are rewound by one thread at a time, but each computes on a stream of its own: the next one's comes after this.
void each_last_restore(const std::vector<at::Tensor>& tensors, void (*each)(c10::Event& event, const c10::Stream& now)) {
  static auto* events = new std::unordered_map<c10::Device, c10::Event>;
  for (const at::Tensor& t : tensors) {
    if (!t.is_cuda()) continue;
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    each(events->try_emplace(t.device(), c10::DeviceType::CUDA).first->second, guard.getStream(t.device()));
  }
}

}  // namespace

// Running statistics, and the values to be put back.
struct st_statistics {
  std::vector<at::Tensor> tensors;
  std::vector<at::Tensor> values;
  TemporaryWrites writes;

  void put_back() {
    for (size_t i = 0; i < values.size(); ++i) set_value(tensors[i], values[i]);
    each_last_restore(tensors, [](c10::Event& event, const c10::Stream& now) { event.record(now); });
    TORCH_CHECK(writes.forget(), "another thread has updated running statistics of batch normalisation meanwhile, which the rerun "
                "updates too. Let one thread at a time have them");
  }
};

extern "C" {

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
      if (read.made || read.storage.expired()) continue;
      TORCH_CHECK(reads->is_unchanged(read), "a tensor of shape ", read.shape);
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

bool st_reads_update_statistics(const st_reads* reads) { return !reads->statistics.empty(); }

st_status st_statistics_rewind(const st_reads* reads, st_statistics** out) {
  return ssdtrain::guarded([&] {
    const c10::NoGradGuard no_grad;
    auto rewound = std::make_unique<st_statistics>();
    for (const auto& known : reads->statistics) rewound->tensors.push_back(known.tensor);
    each_last_restore(rewound->tensors, [](c10::Event& event, const c10::Stream& now) { event.block(now); });
    for (const at::Tensor& t : rewound->tensors) {
      rewound->values.push_back(t.detach().clone());
      rewound->writes.add(t.storage());
    }
    try {
      // Where they overlap, the older value is of what lies beneath.
      for (size_t i = reads->statistics.size(); i-- > 0;) set_value(reads->statistics[i].tensor, reads->statistics[i].before);
    } catch (...) {
      rewound->put_back();
      throw;
    }
    *out = rewound.release();
  });
}

st_status st_statistics_restore(st_statistics* rewound) {
  return ssdtrain::guarded([&] {
    const std::unique_ptr<st_statistics> owned(rewound);
    const c10::NoGradGuard no_grad;
    owned->put_back();
  });
}

}  // extern "C"
