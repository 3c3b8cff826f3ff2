// What a function reads that it did not make, and the running statistics that it updates.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

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
