// Storages that someone watches, and what was written to each since.
#pragma once
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "shim.h"

namespace ssdtrain {

using c10::StorageImpl;

// Bytes of a storage, from the first to before the last; by default it may be any.
struct Span {
  size_t from = 0;
  size_t to = SIZE_MAX;

  bool operator==(const Span& other) const { return from == other.from && to == other.to; }
  bool meets(const Span& other) const { return from < other.to && other.from < to; }
  void add(const Span& other) { from = std::min(from, other.from), to = std::max(to, other.to); }
};

// The latest write to these bytes; times are numbers that no two writes share.
struct Write {
  Span where;
  uint64_t when;

  bool operator==(const Write& other) const { return where == other.where && when == other.when; }
};

// Returns when the storage was last written, as `last_write` does.
uint64_t watch(const StorageImpl* storage);
void unwatch(const StorageImpl* storage);
// Zero, if it was not written since it is watched.
uint64_t last_write(const StorageImpl* storage);
// One for each span that has been written since the storage is watched.
std::vector<Write> writes_of(const StorageImpl* storage);
// An operation of the calling thread writes there, or has written.
void written(const StorageImpl* storage, Span where = {});

// A call that updates statistics there is under way from one to the other.
void update_begins(const StorageImpl* storage);
void update_ends(const StorageImpl* storage);

// Called with each watched storage that is written.
extern void (*tell_written)(const st_storage* storage);

// Storages that the calling thread gives other values for a while, to put back what they hold now.
class TemporaryWrites {
 public:
  TemporaryWrites();
  ~TemporaryWrites();
  TemporaryWrites(const TemporaryWrites&) = delete;
  TemporaryWrites& operator=(const TemporaryWrites&) = delete;

  // Waits for other threads' calls that update statistics there.
  void add(const c10::Storage& storage);
  // Forgets what this thread has written there since, but for writes whose bytes are not known. False if another thread has written to one.
  bool forget();

 private:
  friend void written(const StorageImpl* storage, Span where);

  struct Before {
    c10::Storage storage;
    std::vector<Write> writes;
    uint64_t latest;  // of this thread
    bool alone;       // no other thread has written until then
  };

  std::unordered_map<const StorageImpl*, Before> before_;
};

}  // namespace ssdtrain
