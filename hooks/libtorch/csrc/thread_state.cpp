// What the result of a computation depends on besides what it reads and random numbers: the thread's modes.
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/variable.h>

#include "guard.h"

namespace {

const at::Tensor& tensor(const st_tensor* t) { return *reinterpret_cast<const at::Tensor*>(t); }

// The number of autocast regions around what the thread does.
int autocast_regions() {
  const int within = at::autocast::increment_nesting();
  at::autocast::decrement_nesting();
  return within - 1;
}

// Sets the modes of a thread, and restores them. Operations are not recorded meanwhile (recording.cpp), and autocast's
// cache of cast weights is disabled: what is cached outside of an autocast region would stay in the cache and be taken for the weights of the next step. So would
// what is cached in regions that a panic has left open, as it does those of tch: they are closed.
class Modes final {
 public:
  explicit Modes(const at::ThreadLocalState& state)
      : guard_(state), cached_(at::autocast::is_autocast_cache_enabled()), regions_(autocast_regions()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  Modes(const Modes&) = delete;
  Modes& operator=(const Modes&) = delete;
  ~Modes() {
    for (int open = autocast_regions(); open > regions_; --open) at::autocast::decrement_nesting();
    at::autocast::set_autocast_cache_enabled(cached_);
  }

 private:
  at::ThreadLocalStateGuard guard_;
  const c10::impl::ExcludeDispatchKeyGuard unrecorded_{c10::DispatchKey::Fake};
  bool cached_;
  int regions_;
};

}  // namespace

extern "C" {

bool st_recording(void) { return c10::GradMode::is_enabled(); }

st_status st_tensor_version(const st_tensor* t, uint32_t* version) {
  return ssdtrain::guarded([&] { *version = static_cast<uint32_t>(tensor(t)._version()); });
}

st_status st_tensor_layout(const st_tensor* t, uint64_t* layout) {
  return ssdtrain::guarded([&] {
    const at::Tensor& of = tensor(t);
    TORCH_CHECK(of.defined() && of.layout() == at::kStrided && !of.is_nested() && of.has_storage(), "no strided tensor");
    uint64_t hash = 0xcbf29ce484222325;
    const auto add = [&](int64_t value) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3;
      hash ^= hash >> 29;
    };
    add(static_cast<int64_t>(of.scalar_type()));
    add(static_cast<int64_t>(of.device().type()));
    add(of.device().index());
    add(of.dim());
    for (const int64_t size : of.sizes()) add(size);
    for (const int64_t stride : of.strides()) add(stride);
    add(of.storage_offset());
    *layout = hash;
  });
}

st_status st_tensor_takes_gradient(const st_tensor* of, bool* takes) {
  return ssdtrain::guarded([&] {
    const at::Tensor& t = tensor(of);
    *takes = t.requires_grad();
    const auto* view = torch::autograd::impl::get_view_autograd_meta(t);
    if (view == nullptr || !view->has_bw_view() || view->grad_fn_ != nullptr || view->requires_grad_) return;
    // If its base has changed since, it gets a function when it is asked for one. That may be an error, which must
    // not be raised here.
    *takes = *takes && view->get_attr_version() != t._version();
  });
}

st_status st_modes_of_thread(st_modes** out) {
  return ssdtrain::guarded([&] { *out = reinterpret_cast<st_modes*>(new at::ThreadLocalState()); });
}

void st_modes_free(st_modes* modes) { delete reinterpret_cast<at::ThreadLocalState*>(modes); }

st_status st_modes_enter(const st_modes* modes, st_entered** out) {
  return ssdtrain::guarded([&] {
    *out = reinterpret_cast<st_entered*>(new Modes(*reinterpret_cast<const at::ThreadLocalState*>(modes)));
  });
}

void st_modes_leave(st_entered* entered) { delete reinterpret_cast<Modes*>(entered); }

bool st_cpu_autocast_enter(void) {
  const bool before = at::autocast::is_autocast_enabled(at::kCPU);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::increment_nesting();
  return before;
}

void st_cpu_autocast_leave(bool before) {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, before);
}

}  // extern "C"
