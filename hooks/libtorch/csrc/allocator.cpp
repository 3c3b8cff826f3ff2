// A CPU allocator whose large blocks can be read and written with O_DIRECT, and that counts exactly what is allocated.
//
// Blocks of at least 64 KiB start on a 4 KiB border and have a capacity that is a multiple of 4 KiB; they come in eight size
// classes per doubling and are kept in free lists, so a training loop faults its pages in once. Smaller blocks are malloc's.
// A header of 64 bytes stands before every block's data.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#include "shim.h"

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kLarge = 64 << 10;
constexpr size_t kHugePage = 2 << 20;
constexpr size_t kStepsLog2 = 3;

struct alignas(64) Header {
  size_t requested;
  size_t capacity;  // of the data, without header
};
static_assert(sizeof(Header) == 64);

Header* header_of(void* data) {
  return reinterpret_cast<Header*>(static_cast<char*>(data) - sizeof(Header));
}

int log2_floor(size_t n) { return 63 - __builtin_clzll(n); }

// Rounds up to the class's capacity: an eighth of the power of two below, never less than a page.
size_t class_capacity(size_t n) {
  const size_t step = std::max(kPage, size_t{1} << (log2_floor(n) - kStepsLog2));
  return (n + step - 1) / step * step;
}

size_t class_index(size_t capacity) {
  const int log2 = log2_floor(capacity);
  return (static_cast<size_t>(log2) << kStepsLog2) | ((capacity >> (log2 - kStepsLog2)) & 7);
}

struct FreeList {
  std::mutex mutex;
  std::vector<void*> blocks;
};

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
    for (FreeList& list : free_) {
      std::vector<void*> blocks;
      {
        std::lock_guard lock(list.mutex);
        blocks.swap(list.blocks);
      }
      for (void* data : blocks) unmap(data);
    }
  }

  static void release(void* data);

 private:
  void* take(size_t n) {
    void* data = n < kLarge ? from_malloc(n) : from_free_list(class_capacity(n));
    Header* header = header_of(data);
    header->requested = n;
    const uint64_t now = allocated_.fetch_add(n) + n;
    uint64_t peak = peak_.load();
    while (peak < now && !peak_.compare_exchange_weak(peak, now)) {
    }
    return data;
  }

  void give(void* data) {
    const Header* header = header_of(data);
    allocated_.fetch_sub(header->requested);
    if (header->capacity < kLarge) {
      reserved_.fetch_sub(header->capacity);
      std::free(header_of(data));
      return;
    }
    FreeList& list = free_[class_index(header->capacity)];
    std::lock_guard lock(list.mutex);
    list.blocks.push_back(data);
  }

  void* from_malloc(size_t n) {
    const size_t bytes = (sizeof(Header) + n + 63) / 64 * 64;
    void* base = std::aligned_alloc(64, bytes);
    TORCH_CHECK(base != nullptr, "out of memory: ", n, " bytes asked of the CPU allocator");
    auto* header = new (base) Header{n, n};
    reserved_.fetch_add(n);
    return header + 1;
  }

  void* from_free_list(size_t capacity) {
    FreeList& list = free_[class_index(capacity)];
    {
      std::lock_guard lock(list.mutex);
      if (!list.blocks.empty()) {
        void* data = list.blocks.back();
        list.blocks.pop_back();
        return data;
      }
    }
    return map(capacity);
  }

  // The header takes the end of a page of its own, so that the data starts on a border. Blocks of a huge page and more start
  // on the border of one: fewer pages to fault in, and far fewer for the kernel to pin in each transfer.
  void* map(size_t capacity) {
    const size_t border = capacity >= kHugePage ? kHugePage : kPage;
    const size_t mapped = border + capacity;
    char* base = map_pages(mapped);
    if (base == nullptr) {
      trim();
      base = map_pages(mapped);
    }
    TORCH_CHECK(base != nullptr, "out of memory: ", capacity, " bytes asked of the CPU allocator");
    char* data = base + (border - reinterpret_cast<uintptr_t>(base) % border);
    if (data - kPage > base) munmap(base, data - kPage - base);
    if (data + capacity < base + mapped) munmap(data + capacity, base + mapped - data - capacity);
    if (border == kHugePage) madvise(data, capacity, MADV_HUGEPAGE);
    new (header_of(data)) Header{capacity, capacity};
    reserved_.fetch_add(capacity);
    return data;
  }

  static char* map_pages(size_t bytes) {
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return base == MAP_FAILED ? nullptr : static_cast<char*>(base);
  }

  void unmap(void* data) {
    const size_t capacity = header_of(data)->capacity;
    reserved_.fetch_sub(capacity);
    munmap(static_cast<char*>(data) - kPage, kPage + capacity);
  }

  std::atomic<uint64_t> allocated_{0};
  std::atomic<uint64_t> peak_{0};
  std::atomic<uint64_t> reserved_{0};
  std::array<FreeList, 64 << kStepsLog2> free_;
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
