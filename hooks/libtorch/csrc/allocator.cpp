// A CPU allocator whose large blocks can be read and written with O_DIRECT, and that counts exactly what is allocated.
//
// Blocks of at least 64 KiB start on a 4 KiB border and have a capacity that is a multiple of 4 KiB; they come in eight size
// classes per doubling and are kept in free lists, so a training loop faults its pages in once. They are carved from regions
// of huge pages: fewer pages to fault in, and far fewer for the kernel to pin in each transfer. Smaller blocks are malloc's.
// A header of 64 bytes stands before every block's data.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "shim.h"

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kLarge = 64 << 10;
constexpr size_t kHugePage = 2 << 20;
constexpr size_t kRegion = 32 << 20;
constexpr size_t kStepsLog2 = 3;

// A mapping that blocks are carved from, front to back. It lives until `trim` finds none of them in use.
struct Region {
  char* base;
  size_t bytes;
  size_t carved;  // from the front
  size_t in_use;  // blocks that are not in a free list
};

struct alignas(64) Header {
  size_t requested;
  size_t capacity;  // of the data, without header
  Region* region;   // null where the block is malloc's
};
static_assert(sizeof(Header) == 64);

Header* header_of(void* data) {
  return reinterpret_cast<Header*>(static_cast<char*>(data) - sizeof(Header));
}

size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

int log2_floor(size_t n) { return 63 - __builtin_clzll(n); }

// Rounds up to the class's capacity: an eighth of the power of two below, never less than a page.
size_t class_capacity(size_t n) {
  const size_t step = std::max(kPage, size_t{1} << (log2_floor(n) - kStepsLog2));
  return round_up(n, step);
}

size_t class_index(size_t capacity) {
  const int log2 = log2_floor(capacity);
  return (static_cast<size_t>(log2) << kStepsLog2) | ((capacity >> (log2 - kStepsLog2)) & 7);
}

template <class T, class Test>
void erase_if(std::vector<T>& items, Test test) {
  items.erase(std::remove_if(items.begin(), items.end(), test), items.end());
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    void* data = n == 0 ? nullptr : take(n);
    return {data, data, &Allocator::release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::release; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }

  st_memory memory() const { return {allocated_.load(), peak_.load(), reserved_.load()}; }
  void reset_peak() { peak_.store(allocated_.load()); }

  void trim() {
    std::lock_guard lock(mutex_);
    trim_locked();
  }

  static void release(void* data);

 private:
  void* take(size_t n) {
    void* data = n < kLarge ? from_malloc(n) : from_free_list(class_capacity(n));
    header_of(data)->requested = n;
    const uint64_t now = allocated_.fetch_add(n) + n;
    uint64_t peak = peak_.load();
    while (peak < now && !peak_.compare_exchange_weak(peak, now)) {
    }
    return data;
  }

  void give(void* data) {
    const Header* header = header_of(data);
    allocated_.fetch_sub(header->requested);
    if (header->region == nullptr) {
      reserved_.fetch_sub(header->capacity);
      std::free(header_of(data));
      return;
    }
    std::lock_guard lock(mutex_);
    free_[class_index(header->capacity)].push_back(data);
    --header->region->in_use;
  }

  void* from_malloc(size_t n) {
    const size_t bytes = round_up(sizeof(Header) + n, 64);
    void* base = std::aligned_alloc(64, bytes);
    TORCH_CHECK(base != nullptr, "out of memory: ", n, " bytes asked of the CPU allocator");
    auto* header = new (base) Header{n, n, nullptr};
    reserved_.fetch_add(n);
    return header + 1;
  }

  void* from_free_list(size_t capacity) {
    std::lock_guard lock(mutex_);
    std::vector<void*>& blocks = free_[class_index(capacity)];
    void* data;
    if (blocks.empty()) {
      data = carve(capacity);
    } else {
      data = blocks.back();
      blocks.pop_back();
    }
    ++header_of(data)->region->in_use;
    return data;
  }

  // The header takes the end of a page of its own, so that the data starts on a border.
  void* carve(size_t capacity) {
    const size_t bytes = kPage + capacity;
    Region* region = room(current_) < bytes ? map_region(bytes) : current_;
    if (room(region) - bytes > room(current_)) current_ = region;
    char* data = region->base + region->carved + kPage;
    region->carved += bytes;
    new (header_of(data)) Header{capacity, capacity, region};
    reserved_.fetch_add(capacity);
    return data;
  }

  static size_t room(const Region* region) { return region == nullptr ? 0 : region->bytes - region->carved; }

  // A block larger than most regions gets one of its own.
  Region* map_region(size_t at_least) {
    const size_t bytes = round_up(std::max(at_least, kRegion), kHugePage);
    char* base = map_huge_pages(bytes);
    if (base == nullptr) {
      trim_locked();
      base = map_huge_pages(bytes);
    }
    TORCH_CHECK(base != nullptr, "out of memory: ", at_least, " bytes asked of the CPU allocator");
    return regions_.emplace_back(std::make_unique<Region>(Region{base, bytes, 0, 0})).get();
  }

  // `bytes` from the border of a huge page on, or null.
  static char* map_huge_pages(size_t bytes) {
    void* mapped = mmap(nullptr, kHugePage + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    char* start = static_cast<char*>(mapped);
    char* base = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(start), kHugePage));
    char* end = start + kHugePage + bytes;
    if (base > start) munmap(start, base - start);
    if (end > base + bytes) munmap(base + bytes, end - base - bytes);
    madvise(base, bytes, MADV_HUGEPAGE);
    return base;
  }

  void trim_locked() {
    const auto unused = [](const Region& region) { return region.in_use == 0; };
    for (std::vector<void*>& blocks : free_) {
      erase_if(blocks, [&](void* data) {
        const Header* header = header_of(data);
        if (!unused(*header->region)) return false;
        reserved_.fetch_sub(header->capacity);
        return true;
      });
    }
    if (current_ != nullptr && unused(*current_)) current_ = nullptr;
    erase_if(regions_, [&](const std::unique_ptr<Region>& region) {
      if (!unused(*region)) return false;
      munmap(region->base, region->bytes);
      return true;
    });
  }

  std::atomic<uint64_t> allocated_{0};
  std::atomic<uint64_t> peak_{0};
  std::atomic<uint64_t> reserved_{0};
  // Over everything below.
  std::mutex mutex_;
  std::array<std::vector<void*>, 64 << kStepsLog2> free_;
  std::vector<std::unique_ptr<Region>> regions_;
  Region* current_ = nullptr;  // the one with the most room, which is carved next
};

// Never destroyed: tensors in statics may outlive every destructor.
Allocator& allocator() {
  static Allocator* instance = new Allocator;
  return *instance;
}

void Allocator::release(void* data) {
  if (data != nullptr) allocator().give(data);
}

}  // namespace

extern "C" {

void st_allocator_install(void) {
  c10::SetCPUAllocator(&allocator(), /*priority=*/100);
}

st_memory st_allocator_memory(void) { return allocator().memory(); }
void st_allocator_reset_peak(void) { allocator().reset_peak(); }
void st_allocator_trim(void) { allocator().trim(); }

uint64_t st_storage_capacity(const st_storage* storage) {
  const auto* impl = reinterpret_cast<const c10::StorageImpl*>(storage);
  const c10::DataPtr& data = impl->data_ptr();
  const bool ours = data.get_deleter() == &Allocator::release && data.get() == data.get_context() && data.get() != nullptr;
  return ours ? header_of(data.get())->capacity : impl->nbytes();
}

}  // extern "C"
