#include "watches.h"

#include <array>
#include <atomic>
#include <mutex>

namespace ssdtrain {

namespace {

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

}  // namespace

thread_local std::vector<Writes*> undone;
void (*tell_written)(const st_storage* storage) = nullptr;

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

}  // namespace ssdtrain

using ssdtrain::StorageImpl;

extern "C" {

uint32_t st_storage_watch(const st_storage* storage) { return ssdtrain::watch(reinterpret_cast<const StorageImpl*>(storage)); }
void st_storage_unwatch(const st_storage* storage) { ssdtrain::unwatch(reinterpret_cast<const StorageImpl*>(storage)); }
uint32_t st_storage_writes(const st_storage* storage) { return ssdtrain::writes_of(reinterpret_cast<const StorageImpl*>(storage)); }

}  // extern "C"
