// Storages that are being watched, and what has been written to each since.
#pragma once
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "shim.h"

namespace ssdtrain {

using c10::StorageImpl;

// A half-open byte range of a storage; by default the whole storage.
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

// Starts watching, and returns the time of the storage's last write, like `last_write`.
uint64_t watch(const StorageImpl* storage);
void unwatch(const StorageImpl* storage);
// Zero if the storage has not been written since it has been watched.
uint64_t last_write(const StorageImpl* storage);
// One entry for each span that has been written since the storage has been watched.
std::vector<Write> writes_of(const StorageImpl* storage);
// A number that each write to the storage changes, whether or not it is watched, when it begins and when it ends. Writes
// to some other storages change it too.
uint32_t generation_of(const StorageImpl* storage);
// Whether an operation that writes to the storage, or to some others, has begun but not ended.
bool is_being_written(const StorageImpl* storage);
// An operation that writes to the storage begins; ends with the number that this returns.
size_t write_begins(const StorageImpl* storage);
void write_ends(size_t begun);
// Must be called when an operation of the calling thread is about to write there, or has written.
void written(const StorageImpl* storage, Span where = {});

// Mark the start and the end of a call that updates statistics in this storage.
void update_begins(const StorageImpl* storage);
void update_ends(const StorageImpl* storage);

// Held by the calling thread from one to the other.
void lock_watches();
void unlock_watches();
// In a process that was forked off, while that is held: updates on threads of its parent are over.
void forget_updates();

// Called with each watched storage that is written.
extern void (*tell_written)(const st_storage* storage);

// Storages whose values the calling thread replaces temporarily, to restore the present values later.
class TemporaryWrites {
 public:
  TemporaryWrites();
  ~TemporaryWrites();
  TemporaryWrites(const TemporaryWrites&) = delete;
  TemporaryWrites& operator=(const TemporaryWrites&) = delete;

  // Waits for calls on other threads that update statistics there.
  void add(const c10::Storage& storage);
  // Forgets what this thread has written there since, except for writes whose bytes are not known. Returns false if
  // another thread has written to one of the storages.
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
