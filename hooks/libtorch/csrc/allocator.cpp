// A CPU allocator whose large blocks can be read and written with O_DIRECT, and which counts exactly what is
// allocated.
//
// Blocks of at least 64 KiB are aligned to 4 KiB and have a capacity that is a multiple of 4 KiB. Each is cut from
// the smallest free range that has room for it, and is merged with the free ranges next to it when it is freed, so
// the memory serves tensors of all sizes in turn. It is mapped in huge pages: there are fewer pages to fault in, and
// far fewer for the kernel to pin in each transfer. A huge page without a block can be returned to the system: its
// memory, but not its addresses. Where a fork makes huge pages unsafe, ordinary ones are used (src/huge_pages.rs).
// Smaller blocks come from malloc, behind a header of 64 bytes.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <utility>

#include "forks.h"
#include "shim.h"
#include "shortage.h"

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kLarge = 64 << 10;
constexpr size_t kHugePage = 2 << 20;
// The size of a mapping, if that many addresses are available: memory that is not touched takes up only addresses.
constexpr size_t kMapping = 256 << 20;

// Set before the first block is mapped.
std::atomic<bool> uses_huge_pages{true};

size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }
char* round_up(char* at, size_t step) { return reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(at), step)); }
char* round_down(char* at, size_t step) { return at - reinterpret_cast<uintptr_t>(at) % step; }

// The large blocks, and the memory they are in. The arena's owner must hold its lock during every call.
class Arena {
 public:
  struct Block {
    size_t bytes;
    size_t requested;
    bool in_use;
    uint32_t owners = 1;  // the storage, and whoever holds the block beside it
  };
  using Blocks = std::map<char*, Block>;

  // A block of at least `requested` bytes, or null.
  char* take(size_t requested) {
    const size_t bytes = round_up(requested, kPage);
    auto smallest = free_.lower_bound({bytes, nullptr});
    if (smallest == free_.end()) {
      if (!map(bytes)) return nullptr;
      smallest = free_.lower_bound({bytes, nullptr});
    }
    const auto at = blocks_.find(smallest->second);
    auto range = free_.extract(smallest);
    auto& [data, block] = *at;
    if (block.bytes > bytes) {
      blocks_.emplace_hint(std::next(at), data + bytes, Block{block.bytes - bytes, 0, false});
      range.value() = {block.bytes - bytes, data + bytes};
      free_.insert(std::move(range));
    }
    block = {bytes, requested, true};
    used_ += bytes;
    most_used_ = std::max(most_used_, used_);
    hold(data, bytes);
    return data;
  }

  // The block in use that begins at `data`, or null.
  const Block* find(void* data) const {
    const auto at = blocks_.find(static_cast<char*>(data));
    return at == blocks_.end() || !at->second.in_use ? nullptr : &at->second;
  }

  // Adds an owner to the block in use that begins at `data`; false if there is none.
  bool share(void* data) {
    const auto at = blocks_.find(static_cast<char*>(data));
    if (at == blocks_.end()) return false;
    ++at->second.owners;
    return true;
  }

  // Removes an owner from the block that begins at `data`; without owners the block is free. Returns how many
  // requested bytes were freed, or nothing if there is no such block.
  std::optional<size_t> give(void* data) {
    const auto at = blocks_.find(static_cast<char*>(data));
    if (at == blocks_.end()) return std::nullopt;
    if (--at->second.owners > 0) return 0;
    const size_t requested = at->second.requested;
    used_ -= at->second.bytes;
    join(at);
    return requested;
  }

  size_t held() const { return held_.size() * kHugePage; }

  void end_step() {
    recent_ = std::max(most_used_, recent_ - recent_ / 8);
    most_used_ = used_;
    give_back(limit());
  }

  void trim() {
    recent_ = 0;
    most_used_ = used_;
    give_back(0);
  }

 private:
  // Frees a block and merges it with the free blocks next to it.
  void join(Blocks::iterator at) {
    const auto next = std::next(at);
    if (next != blocks_.end() && !next->second.in_use && at->first + at->second.bytes == next->first) {
      free_.erase({next->second.bytes, next->first});
      at->second.bytes += next->second.bytes;
      blocks_.erase(next);
    }
    if (at != blocks_.begin()) {
      const auto previous = std::prev(at);
      if (!previous->second.in_use && previous->first + previous->second.bytes == at->first) {
        free_.erase({previous->second.bytes, previous->first});
        previous->second.bytes += at->second.bytes;
        blocks_.erase(at);
        at = previous;
      }
    }
    at->second.in_use = false;
    free_.emplace(at->second.bytes, at->first);
  }

  bool map(size_t at_least) {
    const size_t bytes = round_up(at_least, kHugePage);
    size_t mapped = std::max(bytes, kMapping);
    char* base = map_huge_pages(mapped);
    if (base == nullptr) base = map_huge_pages(mapped = bytes);
    if (base == nullptr) return false;
    join(blocks_.emplace(base, Block{mapped, 0, true}).first);
    return true;
  }

  // `bytes` aligned to a huge page, or null. Uses the upper end of what the kernel offers, since the previous mapping
  // is there.
  static char* map_huge_pages(size_t bytes) {
    void* mapped = mmap(nullptr, kHugePage + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    char* start = static_cast<char*>(mapped);
    char* end = start + kHugePage + bytes;
    char* base = round_down(end - bytes, kHugePage);
    if (base > start) munmap(start, base - start);
    if (end > base + bytes) munmap(base + bytes, end - base - bytes);
    madvise(base, bytes, uses_huge_pages.load() ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    return base;
  }

  // The most that may be held: what was recently in use at once, plus what is lost between blocks of changing sizes
  // and at the ends of huge pages.
  size_t limit() const {
    const size_t most = std::max(recent_, most_used_);
    return most + most / 8 + 4 * kHugePage;
  }

  // Called when the block is about to be used. If it needs huge pages that are not held, free pages elsewhere are
  // given back in return.
  void hold(char* data, size_t bytes) {
    char* const end = data + bytes;
    auto held = held_.lower_bound(round_down(data, kHugePage));
    size_t fresh = 0;
    for (char* page = round_down(data, kHugePage); page < end; page += kHugePage) {
      if (held != held_.end() && *held == page) {
        ++held;
      } else {
        held_.insert(held, page);
        ++fresh;
      }
    }
    if (fresh > 0) give_back(limit());
  }

  // Gives back huge pages without a block until no more than `limit` is held. Starts with the largest ranges, which
  // are needed last.
  void give_back(size_t limit) {
    for (auto range = free_.rbegin(); range != free_.rend() && range->first >= kHugePage && held() > limit; ++range) {
      const auto [bytes, data] = *range;
      char* const first = round_up(data, kHugePage);
      auto page = held_.lower_bound(round_down(data + bytes, kHugePage));
      while (held() > limit && page != held_.begin() && *std::prev(page) >= first) {
        --page;
        // This fails if the program has locked its memory.
        if (madvise(*page, kHugePage, MADV_DONTNEED) == 0) page = held_.erase(page);
      }
    }
  }

  Blocks blocks_;                            // by address, in use and free
  std::set<std::pair<size_t, char*>> free_;  // by size
  std::set<char*> held_;                     // huge pages that a block has lain in since they were mapped or given back
  size_t used_ = 0;                          // bytes of blocks in use
  size_t most_used_ = 0;                     // since the last step ended
  size_t recent_ = 0;                        // in the steps before, the older the less
};

// Precedes the data of a small block.
struct alignas(64) Header {
  size_t requested;
  std::atomic<uint32_t> owners{1};  // as of a large block
};
static_assert(sizeof(Header) == 64);

Header* header_of(void* data) { return static_cast<Header*>(data) - 1; }

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    void* data = n == 0 ? nullptr : take(n);
    return {data, data, &Allocator::release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::release; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }

  st_memory memory() const { return {allocated_.load(), peak_.load(), small_.load() + held_.load(), /*requests=*/0}; }
  void reset_peak() { peak_.store(allocated_.load()); }
  void limit(uint64_t bytes) { limit_.store(bytes); }
  void press(uint64_t every) { every_.store(every); }

  void end_step() {
    std::lock_guard lock(mutex_);
    arena_.end_step();
    held_.store(arena_.held());
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  void trim() {
    std::lock_guard lock(mutex_);
    arena_.trim();
    held_.store(arena_.held());
  }

  // The capacity of one of our blocks.
  size_t capacity(void* data) {
    if (may_be_large(data)) {
      std::lock_guard lock(mutex_);
      if (const Arena::Block* block = arena_.find(data)) return block->bytes;
    }
    return header_of(data)->requested;
  }

  // Adds an owner to one of our blocks.
  void share(void* data) {
    if (may_be_large(data)) {
      std::lock_guard lock(mutex_);
      if (arena_.share(data)) return;
    }
    header_of(data)->owners.fetch_add(1, std::memory_order_relaxed);
  }

  static void release(void* data);

 private:
  // The arena's blocks are aligned to a page, and few of malloc's have their data there.
  static bool may_be_large(void* data) { return reinterpret_cast<uintptr_t>(data) % kPage == 0; }

  void* take(size_t n) {
    const uint64_t every = every_.load();
    if (every > 0 && count_.fetch_add(1) % every == 0) ssdtrain::relieved(c10::Device(c10::kCPU), n);
    const bool is_admitted = ceiling_.admits(c10::Device(c10::kCPU), n, [this] { return allocated_.load(); });
    void* data = is_admitted ? try_take(n) : nullptr;
    for (ssdtrain::Shortage shortage(c10::Device(c10::kCPU), n); data == nullptr && shortage.try_again();) data = try_take(n);
    TORCH_CHECK(data != nullptr, "out of memory: ", n, " bytes asked of the CPU allocator");
    const uint64_t now = allocated_.fetch_add(n) + n;
    ceiling_.reached(now);
    uint64_t peak = peak_.load();
    while (peak < now && !peak_.compare_exchange_weak(peak, now)) {
    }
    return data;
  }

  void* try_take(size_t n) {
    if (allocated_.load() + n > limit_.load()) return nullptr;
    return n < kLarge ? take_small(n) : take_large(n);
  }

  void* take_small(size_t n) {
    void* base = std::aligned_alloc(64, round_up(sizeof(Header) + n, 64));
    if (base == nullptr) return nullptr;
    small_.fetch_add(n);
    return new (base) Header{n} + 1;
  }

  void* take_large(size_t n) {
    std::lock_guard lock(mutex_);
    void* data = arena_.take(n);
    held_.store(arena_.held());
    return data;
  }

  void give(void* data) {
    const auto large = may_be_large(data) ? give_large(data) : std::nullopt;
    allocated_.fetch_sub(large.has_value() ? *large : give_small(data));
  }

  size_t give_small(void* data) {
    if (header_of(data)->owners.fetch_sub(1, std::memory_order_acq_rel) > 1) return 0;
    const size_t n = header_of(data)->requested;
    small_.fetch_sub(n);
    std::free(header_of(data));
    return n;
  }

  // Returns nothing if the block is not the arena's.
  std::optional<size_t> give_large(void* data) {
    std::lock_guard lock(mutex_);
    return arena_.give(data);
  }

  std::atomic<uint64_t> allocated_{0};
  std::atomic<uint64_t> peak_{0};
  std::atomic<uint64_t> limit_{std::numeric_limits<uint64_t>::max()};  // of `allocated_`
  ssdtrain::Ceiling& ceiling_ = ssdtrain::ceiling_of(c10::Device(c10::kCPU));
  std::atomic<uint64_t> every_{0};  // one allocation in so many asks for memory though there is some; 0 for none
  std::atomic<uint64_t> count_{0};
  std::atomic<uint64_t> small_{0};  // bytes of malloc's blocks
  std::atomic<uint64_t> held_{0};   // by the arena
  std::mutex mutex_;
  Arena arena_;
};

// Never destroyed: tensors in statics may outlive every destructor.
Allocator& allocator() {
  static Allocator* instance = new Allocator;
  return *instance;
}

void Allocator::release(void* data) {
  if (data != nullptr) allocator().give(data);
}

bool is_ours(const c10::DataPtr& data) {
  return data.get_deleter() == &Allocator::release && data.get() == data.get_context() && data.get() != nullptr;
}

}  // namespace

namespace ssdtrain {

void lock_allocator() { allocator().lock(); }
void unlock_allocator() { allocator().unlock(); }

}  // namespace ssdtrain

extern "C" {

void st_allocator_install(bool huge_pages) {
  uses_huge_pages.store(huge_pages);
  c10::SetCPUAllocator(&allocator(), /*priority=*/100);
}

st_memory st_allocator_memory(void) { return allocator().memory(); }
void st_allocator_reset_peak(void) { allocator().reset_peak(); }
void st_allocator_end_step(void) { allocator().end_step(); }
void st_allocator_trim(void) {
  allocator().trim();
  // The small blocks, and all else that was freed in between.
  malloc_trim(/*pad=*/0);
}
void st_allocator_limit(uint64_t bytes) { allocator().limit(bytes); }
void st_allocator_press(uint64_t every) { allocator().press(every); }

uint64_t st_storage_capacity(const st_storage* storage) {
  const auto* impl = reinterpret_cast<const c10::StorageImpl*>(storage);
  return is_ours(impl->data_ptr()) ? allocator().capacity(impl->data_ptr().get()) : impl->nbytes();
}

st_block st_storage_block(const st_storage* storage) {
  const auto* impl = reinterpret_cast<const c10::StorageImpl*>(storage);
  const bool held = is_ours(impl->data_ptr());
  if (held) st_block_hold(impl->data_ptr().get());
  return {impl->data_ptr().get(), impl->nbytes(), st_storage_capacity(storage), held};
}

void st_block_hold(void* data) { allocator().share(data); }
void st_block_release(void* data) { Allocator::release(data); }

}  // extern "C"
