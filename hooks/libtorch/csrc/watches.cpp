#include "watches.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>

#include "of_thread.h"

namespace ssdtrain {

namespace {

// Counters of the storages at some addresses. Most writes go to storages that nobody watches, which this shows without a
// lock.
struct Counters {
  std::atomic<uint32_t> watchers, generation, writing;
};

// A storage takes more than these bytes, so no two of one region of the heap share counters. Each region's begin at a
// place of their own, and next to each other as the storages do, so that the processor's caches hold them.
constexpr size_t kStorageBits = 4, kPlaceBits = 18;
static_assert(sizeof(StorageImpl) >= 1 << kStorageBits);
std::array<Counters, 1 << kPlaceBits> counters;

size_t place_of(const StorageImpl* storage) {
  const uint64_t address = reinterpret_cast<uintptr_t>(storage) >> kStorageBits;
  const uint64_t region = (address >> kPlaceBits) * 0x9e3779b97f4a7c15;
  return (address + (region >> (64 - kPlaceBits))) % counters.size();
}

Counters& counters_of(const StorageImpl* storage) { return counters[place_of(storage)]; }

struct Watched {
  uint32_t watchers = 0;
  std::vector<Write> writes;

  uint64_t last() const {
    uint64_t last = 0;
    for (const Write& write : writes) last = std::max(last, write.when);
    return last;
  }
};

struct Watches {
  std::mutex mutex;
  uint64_t now = 0;
  std::unordered_map<const StorageImpl*, Watched> storages;
  // The number of calls in progress, by the storage that they update.
  std::unordered_map<const StorageImpl*, uint32_t> updates;
  std::condition_variable update_ended;

  Watched* find(const StorageImpl* storage) {
    const auto place = storages.find(storage);
    return place == storages.end() ? nullptr : &place->second;
  }
};

// Never destroyed: tensors in statics may outlive every destructor.
Watches& watches() {
  static Watches* instance = new Watches;
  return *instance;
}

// The temporary writes of the calling thread.
std::vector<TemporaryWrites*>* temporary() { return of_thread<std::vector<TemporaryWrites*>>(); }

}  // namespace

void (*tell_written)(const st_storage* storage) = nullptr;

uint64_t watch(const StorageImpl* storage) {
  std::lock_guard lock(watches().mutex);
  Watched& watched = watches().storages[storage];
  ++watched.watchers;
  counters_of(storage).watchers.fetch_add(1);
  return watched.last();
}

void unwatch(const StorageImpl* storage) {
  std::lock_guard lock(watches().mutex);
  Watched* watched = watches().find(storage);
  if (watched == nullptr) return;
  counters_of(storage).watchers.fetch_sub(1);
  if (--watched->watchers == 0) watches().storages.erase(storage);
}

uint64_t last_write(const StorageImpl* storage) {
  std::lock_guard lock(watches().mutex);
  const Watched* watched = watches().find(storage);
  return watched == nullptr ? 0 : watched->last();
}

std::vector<Write> writes_of(const StorageImpl* storage) {
  std::lock_guard lock(watches().mutex);
  const Watched* watched = watches().find(storage);
  return watched == nullptr ? std::vector<Write>() : watched->writes;
}

uint32_t generation_of(const StorageImpl* storage) { return counters_of(storage).generation.load(); }

bool is_being_written(const StorageImpl* storage) { return counters_of(storage).writing.load() != 0; }

size_t write_begins(const StorageImpl* storage) {
  const size_t place = place_of(storage);
  counters[place].writing.fetch_add(1);
  counters[place].generation.fetch_add(1);
  return place;
}

void write_ends(size_t begun) {
  counters[begun].generation.fetch_add(1);
  counters[begun].writing.fetch_sub(1);
}

void written(const StorageImpl* storage, Span where) {
  if (counters_of(storage).watchers.load() == 0) return;
  uint64_t before = 0, now = 0;
  {
    std::lock_guard lock(watches().mutex);
    Watched* watched = watches().find(storage);
    if (watched == nullptr) return;
    before = watched->last();
    now = ++watches().now;
    auto& writes = watched->writes;
    const auto same = std::find_if(writes.begin(), writes.end(), [&](const Write& write) { return write.where == where; });
    if (same == writes.end()) {
      writes.push_back(Write{where, now});
    } else {
      same->when = now;
    }
  }
  if (const auto* own = temporary()) {
    for (TemporaryWrites* writes : *own) {
      const auto place = writes->before_.find(storage);
      if (place == writes->before_.end()) continue;
      place->second.alone = place->second.alone && before == place->second.latest;
      place->second.latest = now;
    }
  }
  tell_written(reinterpret_cast<const st_storage*>(storage));
}

void lock_watches() { watches().mutex.lock(); }
void unlock_watches() { watches().mutex.unlock(); }

void forget_updates() {
  watches().updates.clear();
  // Threads of the parent may be waiting for the one that there was, which would have to wait for them.
  new (&watches().update_ended) std::condition_variable;
}

void update_begins(const StorageImpl* storage) {
  std::lock_guard lock(watches().mutex);
  ++watches().updates[storage];
}

void update_ends(const StorageImpl* storage) {
  std::lock_guard lock(watches().mutex);
  const auto place = watches().updates.find(storage);
  if (place == watches().updates.end() || --place->second > 0) return;
  watches().updates.erase(place);
  watches().update_ended.notify_all();
}

TemporaryWrites::TemporaryWrites() {
  auto* own = temporary();
  TORCH_CHECK(own != nullptr, "the thread ends, and what it writes cannot be taken back any more");
  own->push_back(this);
}

TemporaryWrites::~TemporaryWrites() {
  if (auto* own = temporary()) own->erase(std::remove(own->begin(), own->end(), this), own->end());
  for (const auto& one : before_) unwatch(one.first);
}

void TemporaryWrites::add(const c10::Storage& storage) {
  const StorageImpl* key = storage.unsafeGetStorageImpl();
  if (before_.count(key) != 0) return;
  std::unique_lock lock(watches().mutex);
  watches().update_ended.wait(lock, [&] { return watches().updates.count(key) == 0; });
  Watched& watched = watches().storages[key];
  before_.emplace(key, Before{storage, watched.writes, watched.last(), true});
  ++watched.watchers;
  counters_of(key).watchers.fetch_add(1);
}

bool TemporaryWrites::forget() {
  bool alone = true;
  std::lock_guard lock(watches().mutex);
  for (auto& [storage, before] : before_) {
    Watched* watched = watches().find(storage);
    if (watched == nullptr) continue;
    const bool forgotten = before.alone && watched->last() == before.latest;
    alone = alone && forgotten;
    if (!forgotten) continue;
    for (const Write& write : watched->writes) {
      if (!(write.where == Span{})) continue;
      auto& writes = before.writes;
      writes.erase(std::remove_if(writes.begin(), writes.end(), [](const Write& one) { return one.where == Span{}; }), writes.end());
      writes.push_back(write);
    }
    watched->writes = before.writes;
    const auto* own = temporary();
    if (own == nullptr) continue;
    for (TemporaryWrites* outer : *own) {
      const auto place = outer->before_.find(storage);
      if (place != outer->before_.end()) place->second.latest = watched->last();
    }
  }
  return alone;
}

}  // namespace ssdtrain

using ssdtrain::StorageImpl;

extern "C" {

uint64_t st_storage_watch(const st_storage* storage) { return ssdtrain::watch(reinterpret_cast<const StorageImpl*>(storage)); }
void st_storage_unwatch(const st_storage* storage) { ssdtrain::unwatch(reinterpret_cast<const StorageImpl*>(storage)); }
uint64_t st_storage_last_write(const st_storage* storage) {
  return ssdtrain::last_write(reinterpret_cast<const StorageImpl*>(storage));
}

}  // extern "C"
