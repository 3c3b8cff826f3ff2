// Writes of operations, as reported by libtorch's own operation observers: above autograd, on every thread, for
// composite operations and those within them. Version counters see less: pieces of a storage have counters of their
// own, and so does the result of `Tensor::data`.
#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "guard.h"
#include "operations.h"
#include "watches.h"

using namespace ssdtrain;

namespace {

// Kept from the start of a call to its end.
struct Later final : at::ObserverContext {
  struct One {
    c10::Storage storage;
    Span where;
    bool updates;
  };
  std::vector<One> writes;
  std::vector<size_t> begun;

  ~Later() override {
    for (const size_t write : begun) write_ends(write);
    for (const One& one : writes) {
      if (one.updates) update_ends(one.storage.unsafeGetStorageImpl());
    }
  }
};

std::unique_ptr<at::ObserverContext> call_starts(const at::RecordFunction& call) {
  const Operation& operation = known(call);
  if ((operation.written | operation.statistics) == 0) return nullptr;
  const auto arguments = call.inputs();
  const uint64_t statistics = statistics_written_in(operation, arguments);
  auto later = std::make_unique<Later>();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (((operation.written | statistics) & bit(i)) == 0) continue;
    const bool again = ((operation.written_after_saving | statistics) & bit(i)) != 0;
    const bool updated = (statistics & bit(i)) != 0;
    each_tensor(arguments[i], [&](const at::Tensor& t) {
      const Span where = updated ? span_of(t) : Span{};
      later->begun.push_back(write_begins(storage_of(t)));
      if (again) {
        later->writes.push_back(Later::One{c10::Storage(shared_storage_of(t)), where, updated});
        if (updated) update_begins(storage_of(t));
      }
      written(storage_of(t), where);
    });
  }
  return later;
}

void call_ends(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  for (const auto& one : static_cast<Later*>(context)->writes) written(one.storage.unsafeGetStorageImpl(), one.where);
}

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

}  // extern "C"
