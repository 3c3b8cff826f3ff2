// What the outcome of a computation hangs on beside its inputs and random numbers: the thread's modes, and the leaves it reads.
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "guard.h"

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

const at::Tensor& tensor(const st_tensor* t) { return *reinterpret_cast<const at::Tensor*>(t); }

// Sets the modes of a thread, and restores them. Autocast's cache of cast weights is off meanwhile: what is entered outside of
// an autocast region would stay there, and be taken for the weights of the next step.
class Modes final {
 public:
  explicit Modes(const at::ThreadLocalState& state) : guard_(state), cached_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  Modes(const Modes&) = delete;
  Modes& operator=(const Modes&) = delete;
  ~Modes() { at::autocast::set_autocast_cache_enabled(cached_); }

 private:
  at::ThreadLocalStateGuard guard_;
  bool cached_;
};

struct Leaves {
  std::vector<std::pair<c10::VariableVersion, uint32_t>> versions;
};

// The node that the gradient of `t` goes to.
const Node* gradient_node(const at::Tensor& t) {
  if (!t.requires_grad()) return nullptr;
  return t.is_leaf() ? torch::autograd::impl::grad_accumulator(t).get() : t.grad_fn().get();
}

}  // namespace

extern "C" {

bool st_recording(void) { return c10::GradMode::is_enabled(); }

st_status st_tensor_version(const st_tensor* t, uint32_t* version) {
  return ssdtrain::guarded([&] { *version = static_cast<uint32_t>(tensor(t)._version()); });
}

uint64_t st_tensor_layout(const st_tensor* t) {
  const at::Tensor& of = tensor(t);
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
  return hash;
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

st_status st_leaves_between(const st_tensor* output, const st_tensor* const* inputs, size_t count, st_leaves** out) {
  return ssdtrain::guarded([&] {
    auto leaves = std::make_unique<Leaves>();
    std::unordered_set<const Node*> seen{nullptr};
    for (size_t i = 0; i < count; ++i) seen.insert(gradient_node(tensor(inputs[i])));
    std::vector<Node*> pending;
    const auto visit = [&](Node* node) {
      if (seen.insert(node).second) pending.push_back(node);
    };
    visit(tensor(output).grad_fn().get());
    while (!pending.empty()) {
      Node* node = pending.back();
      pending.pop_back();
      if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(node)) {
        const auto& version = leaf->variable.unsafeGetTensorImpl()->version_counter();
        if (version.enabled()) leaves->versions.emplace_back(version, version.current_version());
      }
      for (const auto& edge : node->next_edges()) visit(edge.function.get());
    }
    *out = reinterpret_cast<st_leaves*>(leaves.release());
  });
}

bool st_leaves_unchanged(const st_leaves* leaves) {
  for (const auto& [version, then] : reinterpret_cast<const Leaves*>(leaves)->versions) {
    if (version.current_version() != then) return false;
  }
  return true;
}

void st_leaves_free(st_leaves* leaves) { delete reinterpret_cast<Leaves*>(leaves); }

}  // extern "C"
