// Saved-tensor hooks without Python.
//
// Autograd asks its engine for hooks each time it saves a tensor. Our engine answers with a `Saved` while the saving
// thread has a context. It forwards everything else to the previous engine, whose threads and queues remain the only
// ones.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>

#include <exception>
#include <mutex>
#include <optional>

#include "guard.h"
#include "operations.h"
#include "plain.h"

namespace ssdtrain {
namespace {

using torch::autograd::Engine;

const st_callbacks* callbacks = nullptr;
thread_local const void* active_context = nullptr;

// Ends a function whose remaining work nobody needs. A c10::Error would also collect a backtrace, and whoever reads its
// message would wait for the names in it.
struct Stop final : std::exception {
  const char* what() const noexcept override {
    return "ssdtrain ends this function here, because backward needs nothing more of it";
  }
};

// Raises the message of the callback that just failed, or a stop.
void check(st_status status) {
  if (status == ST_STOP) throw Stop();
  TORCH_CHECK(status == 0, callbacks->error());
}

// A tensor that autograd saved: either the tensor itself, or a handle and the view to rebuild on its storage.
class Saved final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Saved(const void* context) : context_(context) {}
  Saved(const Saved&) = delete;
  Saved& operator=(const Saved&) = delete;
  ~Saved() override {
    if (handle_ != nullptr) callbacks->release(handle_);
  }

  void call_pack_hook(const at::Tensor& t) override {
    const bool versioned = t.defined() && !t.is_inference();
    if (versioned) {
      version_ = t.unsafeGetTensorImpl()->version_counter();
      saved_version_ = version_.current_version();
    }
    st_saved saved{};
    if (versioned && is_plain(t)) {
      c10::StorageImpl* storage = t.storage().unsafeGetStorageImpl();
      saved = {reinterpret_cast<st_storage*>(storage), storage->nbytes(), t.nbytes(), saved_version_,
               static_cast<int8_t>(t.device().type()), static_cast<int8_t>(t.device().index()), true,
               reinterpret_cast<const st_tensor*>(&t)};
    }
    {
      // What we look at here is not read by the function. The guard costs as much as everything else here, so it is
      // used only while reads are being recorded.
      std::optional<at::DisableRecordFunctionGuard> unseen;
      if (is_noting_reads()) unseen.emplace();
      const c10::impl::ExcludeDispatchKeyGuard unrecorded(c10::DispatchKey::Fake);
      check(callbacks->pack(context_, &saved, &handle_));
    }
    if (handle_ == nullptr) {
      // An operation's own result holds its graph, so holding the result would create a cycle.
      kept_ = t.defined() && t.requires_grad() ? t.tensor_data() : t;
      return;
    }
    source_ = saved.storage;
    sizes_ = t.sizes();
    strides_ = t.strides();
    offset_ = t.storage_offset();
    keys_ = c10::DispatchKeySet(t.options().computeDispatchKey());
    dtype_ = t.dtype();
  }

  at::Tensor call_unpack_hook() override {
    check_version();
    if (handle_ == nullptr) return kept_;
    st_storage* raw = nullptr;
    check(callbacks->unpack(handle_, &raw));
    auto storage = c10::Storage(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim(reinterpret_cast<c10::StorageImpl*>(raw)));
    // Does the same as set_(), without going through the dispatcher twice.
    auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys_, dtype_);
    view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes_, strides_, offset_);
    // If the source itself came back, changes to it must still be visible to whoever saves the view again. Anything
    // else is new.
    view.unsafeGetTensorImpl()->set_version_counter(raw == source_ ? version_ : c10::VariableVersion(0));
    return view;
  }

 private:
  // Autograd leaves this check to the hooks if any are set.
  void check_version() const {
    if (!version_.enabled()) return;
    const uint32_t now = version_.current_version();
    TORCH_CHECK(now == saved_version_,
                "one of the variables needed for gradient computation has been modified by an inplace operation: it is at "
                "version ", now, "; expected version ", saved_version_,
                " instead. Clone the tensor before changing it, or change it before it is used.");
  }

  const void* context_;
  void* handle_ = nullptr;
  at::Tensor kept_;
  c10::VariableVersion version_;
  uint32_t saved_version_ = 0;
  const st_storage* source_ = nullptr;  // an identity, never dereferenced
  int64_t offset_ = 0;
  c10::DimVector sizes_;
  c10::DimVector strides_;
  c10::DispatchKeySet keys_;
  caffe2::TypeMeta dtype_;
};

class HookedEngine final : public Engine {
 public:
  explicit HookedEngine(Engine& base) : base_(base) {}
  ~HookedEngine() override { stop(); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (active_context != nullptr) return std::make_unique<Saved>(active_context);
    return base_.get_default_saved_variable_hooks();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    // Threads of backward take over the modes of this one. They record nothing.
    const c10::impl::ExcludeDispatchKeyGuard unrecorded(c10::DispatchKey::Fake);
    return base_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task, std::shared_ptr<torch::autograd::Node> graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return base_.execute_with_graph_task(graph_task, std::move(graph_root), std::move(input_buffer));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return base_.make_anomaly_metadata();
  }
  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& graph_task,
                           const std::shared_ptr<torch::autograd::Node>& fn, std::exception& e) override {
    base_.thread_on_exception(graph_task, fn, e);
  }
  void thread_init(int device, const std::shared_ptr<torch::autograd::ReadyQueue>& ready_queue,
                   bool should_increment) override {
    base_.thread_init(device, ready_queue, should_increment);
  }

 private:
  Engine& base_;
};

HookedEngine* engine = nullptr;  // never destroyed: autograd may run until the process ends

const at::Tensor& tensor(const st_tensor* t) { return *reinterpret_cast<const at::Tensor*>(t); }

}  // namespace
}  // namespace ssdtrain

using namespace ssdtrain;

extern "C" {

st_status st_install(const st_callbacks* table) {
  return guarded([&] {
    static std::once_flag once;
    std::call_once(once, [&] {
      callbacks = table;
      engine = new HookedEngine(Engine::get_default_engine());
      torch::autograd::set_default_engine_stub([]() -> Engine& { return *engine; });
    });
  });
}

void st_activate(const void* context) { active_context = context; }

st_status st_backward(const st_tensor* loss, bool retain_graph, bool create_graph) {
  return guarded([&] { torch::autograd::backward({tensor(loss)}, {}, retain_graph, create_graph); });
}

st_status st_variable_save(const st_tensor* t, st_variable** out) {
  return guarded([&] {
    auto hooks = Engine::get_default_engine().get_default_saved_variable_hooks();
    TORCH_CHECK(hooks != nullptr, "no saved-tensor hooks are active on this thread");
    hooks->call_pack_hook(tensor(t).detach());
    *out = reinterpret_cast<st_variable*>(hooks.release());
  });
}

st_status st_variable_unpack(st_variable* variable, st_tensor** out) {
  return guarded([&] {
    auto* hooks = reinterpret_cast<torch::autograd::SavedVariableHooks*>(variable);
    *out = reinterpret_cast<st_tensor*>(new at::Tensor(hooks->call_unpack_hook()));
  });
}

void st_variable_free(st_variable* variable) {
  delete reinterpret_cast<torch::autograd::SavedVariableHooks*>(variable);
}

}  // extern "C"
