// Memory that runs out. libtorch's allocator for CUDA is wrapped by one that asks before it fails, and then tries again.
//
// libtorch itself offers two ways to hear of a shortage. Callbacks (`FreeMemoryCallback`) run whenever its cache has no
// block, long before memory is short, under the allocator's lock, and do not say how much is wanted of which device.
// Observers of an allocation that has failed cannot have it tried again. The wrapper is reached only by an allocation
// that has really failed, outside of all locks, and knows its size.
#include "shortage.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>

#include "guard.h"

// The base class's own way to what is passed on refers to these, so the linker would look for them. They are not called.
[[gnu::weak]] cudaError_t cudaMemGetInfo(size_t*, size_t*);
namespace c10::cuda {
[[gnu::weak]] void c10_cuda_check_implementation(int32_t, const char*, const char*, uint32_t, bool);
}

namespace {

using namespace c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::MempoolId_t;

using Relieve = uint64_t (*)(int8_t device_type, int8_t device_index, uint64_t bytes);
std::atomic<Relieve> reliever{nullptr};
std::atomic<bool (*)()> asker{nullptr};

// For the CPU, whose index is -1, and for each index that a CUDA device may have.
std::array<ssdtrain::Ceiling, 1 + std::numeric_limits<DeviceIndex>::max() + 1> ceilings;
ssdtrain::Ceiling* ceiling_at(DeviceIndex index) { return &ceilings[index < 0 ? 0 : 1 + static_cast<size_t>(index)]; }

std::atomic<int> pools{0};  // that allocations go to, such as those of a graph that is being captured

// What libtorch allocates for so many bytes at most: whole units for few, and for many a block that may be larger.
uint64_t block_for(size_t bytes) {
  constexpr uint64_t kUnit = 512, kSmall = 1 << 20;
  return bytes <= kSmall ? (bytes + kUnit - 1) / kUnit * kUnit : bytes + kSmall;
}

// The bytes of a device that are allocated.
uint64_t allocated(CUDAAllocator* inner, c10::Device device) {
  constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return static_cast<uint64_t>(inner->getDeviceStats(device.index()).allocated_bytes[all].current);
}

// Allocates below the ceiling of the current device, if it has one and as far as that is possible.
template <class Allocate>
auto heeding(CUDAAllocator* inner, size_t bytes, Allocate&& allocate) {
  const auto device = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
  auto& ceiling = ssdtrain::ceiling_of(device);
  // Who captures a graph must not wait for the device.
  if (bytes == 0 || !ceiling.is_set() || pools.load() > 0) return allocate();
  const bool may = ceiling.admits(device, block_for(bytes), [&] { return allocated(inner, device); });
  TORCH_CHECK_WITH(OutOfMemoryError, may, bytes, " bytes are beyond what is to be allocated of ", device);
  auto made = allocate();
  ceiling.reached(allocated(inner, device));
  return made;
}

// Allocates, and has memory freed as long as that fails.
template <class Allocate>
auto asking(size_t bytes, Allocate&& allocate) {
  std::optional<ssdtrain::Shortage> shortage;
  for (;;) {
    try {
      return allocate();
    } catch (const c10::OutOfMemoryError&) {
      if (!shortage) shortage.emplace(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice(), bytes);
      if (!shortage->try_again()) throw;
    }
  }
}

// The allocator that was there before, except that it asks. Every virtual function is passed on: a test compares the
// list with libtorch's header.
class Asking final : public CUDAAllocator {
 public:
  explicit Asking(CUDAAllocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t n) override {
    return heeding(inner_, n, [&] { return asking(n, [&] { return inner_->allocate(n); }); });
  }
  void* raw_alloc(size_t n) override {
    return heeding(inner_, n, [&] { return asking(n, [&] { return inner_->raw_alloc(n); }); });
  }
  void* raw_alloc_with_stream(size_t n, cudaStream_t stream) override {
    return heeding(inner_, n, [&] { return asking(n, [&] { return inner_->raw_alloc_with_stream(n, stream); }); });
  }

  bool is_simple_data_ptr(const c10::DataPtr& ptr) const override { return inner_->is_simple_data_ptr(ptr); }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t n) const override { inner_->copy_data(to, from, n); }
  bool initialized() override { return inner_->initialized(); }
  void emptyCache(MempoolId_t pool) override { inner_->emptyCache(pool); }
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override { inner_->recordStream(ptr, stream); }
  void recordStream(const c10::DataPtr& ptr, c10::cuda::CUDAStream stream) override { inner_->recordStream(ptr, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    return inner_->getDeviceStats(device);
  }
  void resetAccumulatedStats(DeviceIndex device) override { inner_->resetAccumulatedStats(device); }
  void resetPeakStats(DeviceIndex device) override { inner_->resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override { return inner_->getMemoryInfo(device); }
  void raw_delete(void* ptr) override { inner_->raw_delete(ptr); }
  void init(int devices) override { inner_->init(devices); }
  double getMemoryFraction(DeviceIndex device) override { return inner_->getMemoryFraction(device); }
  void setMemoryFraction(double fraction, DeviceIndex device) override { inner_->setMemoryFraction(fraction, device); }
  std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return inner_->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { inner_->enable(value); }
  bool isEnabled() const override { return inner_->isEnabled(); }
  void cacheInfo(DeviceIndex device, size_t* largest) override { inner_->cacheInfo(device, largest); }
  void* getBaseAllocation(void* ptr, size_t* size) override { return inner_->getBaseAllocation(ptr, size); }
  SnapshotInfo snapshot(MempoolId_t pool, bool traces) override { return inner_->snapshot(pool, traces); }
  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    inner_->beginAllocateToPool(device, pool, std::move(filter));
    pools.fetch_add(1);
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    inner_->endAllocateToPool(device, pool);
    // One that was begun before this allocator was there has not been counted.
    int now = pools.load();
    while (now > 0 && !pools.compare_exchange_weak(now, now - 1)) {
    }
  }
  void releasePool(DeviceIndex device, MempoolId_t pool) override { inner_->releasePool(device, pool); }
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override { return inner_->getPoolUseCount(device, pool); }
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool, std::shared_ptr<CUDAAllocator> by) override {
    inner_->createOrIncrefPool(device, pool, std::move(by));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use) override { inner_->setUseOnOOM(device, pool, use); }
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override { inner_->setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool, const std::unordered_set<void*>& live) override {
    return inner_->checkPoolLiveAllocations(device, pool, live);
  }
  ShareableHandle shareIpcHandle(void* ptr) override { return inner_->shareIpcHandle(ptr); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return inner_->getIpcDevPtr(std::move(handle)); }
  bool isHistoryEnabled() override { return inner_->isHistoryEnabled(); }
  void recordHistory(bool enabled, CreateContextFn recorder, size_t most, RecordContext when, bool clear,
                     const std::vector<std::string>& skipped) override {
    inner_->recordHistory(enabled, recorder, most, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& data) override {
    inner_->recordAnnotation(data);
  }
  void pushCompileContext(std::string& data) override { inner_->pushCompileContext(data); }
  void popCompileContext() override { inner_->popCompileContext(); }
  void setUserMetadata(const std::string& data) override { inner_->setUserMetadata(data); }
  std::string getUserMetadata() override { return inner_->getUserMetadata(); }
  void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
    inner_->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    inner_->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(DeviceIndex device, DeviceIndex to) override { inner_->enablePeerAccess(device, to); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t n, cudaStream_t stream,
                          bool p2p) override {
    return inner_->memcpyAsync(to, to_device, from, from_device, n, stream, p2p);
  }
  std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
    return inner_->getCheckpointState(device, pool);
  }
  CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<AllocatorState> state) override {
    return inner_->setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override { return inner_->name(); }

 private:
  CUDAAllocator* const inner_;
};

// Where libtorch_cuda keeps its allocator; nothing is linked for it, so it is looked up.
std::atomic<CUDAAllocator*>* current() {
  return static_cast<std::atomic<CUDAAllocator*>*>(dlsym(RTLD_DEFAULT, "_ZN3c104cuda20CUDACachingAllocator9allocatorE"));
}

}  // namespace

namespace ssdtrain {

uint64_t relieved(c10::Device device, uint64_t bytes) noexcept {
  const Relieve relieve = reliever.load();
  if (relieve == nullptr) return 0;
  return relieve(static_cast<int8_t>(device.type()), static_cast<int8_t>(device.index()), bytes);
}

bool asks() noexcept {
  bool (*const asks)() = asker.load();
  return asks == nullptr || asks();
}

Ceiling& ceiling_of(c10::Device device) { return *ceiling_at(device.is_cuda() ? device.index() : -1); }

bool Shortage::try_again() noexcept {
  // Other threads may take what is freed again and again.
  constexpr int kMost = 64;
  if (++tries_ > kMost) return false;
  const bool in_pieces = freed_ >= wanted_ && wanted_ <= std::numeric_limits<uint64_t>::max() / 2;
  wanted_ = in_pieces ? 2 * wanted_ : wanted_;
  freed_ = relieved(device_, wanted_);
  return freed_ > 0;
}

}  // namespace ssdtrain

extern "C" {

void st_shortage_relieve(uint64_t (*relieve)(int8_t device_type, int8_t device_index, uint64_t bytes),
                         bool (*asks)(void)) {
  reliever.store(relieve);
  asker.store(asks);
}

void st_ceiling_set(int8_t cuda_index, uint64_t bytes) { ceiling_at(cuda_index)->set(bytes); }

uint64_t st_ceiling_asked(int8_t cuda_index) { return ceiling_at(cuda_index)->asked(); }

st_status st_device_ask(void) {
  return ssdtrain::guarded([] {
    static std::mutex mutex;
    static Asking* asking = nullptr;
    const std::lock_guard lock(mutex);
    if (asking != nullptr) return;
    auto* const place = current();
    TORCH_CHECK(place != nullptr && place->load() != nullptr, "libtorch's allocator for CUDA is not where this build expects it");
    // Never destroyed, as the one that it passes on to.
    auto* const made = new Asking(place->load());
    place->store(made);
    c10::SetAllocator(c10::DeviceType::CUDA, made, /*priority=*/100);
    asking = made;
  });
}

}  // extern "C"
