// Storages that someone watches, and how often each was written since.
#pragma once
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "shim.h"

namespace ssdtrain {

using c10::StorageImpl;

// How often storages were written, of those whose values a thread will put back.
using Writes = std::unordered_map<const StorageImpl*, uint32_t>;
// Of the calling thread.
extern thread_local std::vector<Writes*> undone;

uint32_t watch(const StorageImpl* storage);
void unwatch(const StorageImpl* storage);
uint32_t writes_of(const StorageImpl* storage);
// An operation writes to it, or has written.
void written(const StorageImpl* storage);
// Takes back that it was written so often.
void unwrite(const StorageImpl* storage, uint32_t writes);

// Called with each watched storage that is written.
extern void (*tell_written)(const st_storage* storage);

}  // namespace ssdtrain
