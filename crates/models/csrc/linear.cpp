// A linear layer that adds to its weight's gradient in place.
//
// Autograd's own layer creates a gradient as large as the weight and then adds it to the existing one; for a wide
// layer that is as much memory as its activations. Here the product is accumulated directly into the gradient, under
// the lock and on the stream of the node that autograd would use to add it. A gradient that is meant for anything
// else takes autograd's own path.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>

#include "shim.h"

namespace ssdtrain::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::variable_list;

// The lock of a node, which AccumulateGrad holds while it adds.
struct Lock : Node {
  static std::mutex& of(Node& node) { return node.*(&Lock::mutex_); }
};

// While this exists, the calling thread's stream takes the place of the node's own: its work comes after everything
// queued there before, and before everything queued later.
class InStreamOf {
 public:
  InStreamOf(Node& node, const at::Tensor& leaf) : there_(leaf.is_cuda() ? node.stream() : c10::nullopt) {
    if (!there_) return;
    here_ = guard().getStream(there_->device());
    if (*here_ == *there_) {
      there_.reset();
    } else {
      follow(*here_, *there_);
    }
  }
  InStreamOf(const InStreamOf&) = delete;

  // Both streams use `sum`: its memory must not be reused before both are done.
  void end(const at::Tensor& sum) {
    if (!there_) return;
    guard().recordDataPtrOnStream(sum.storage().data_ptr(), *here_);
    guard().recordDataPtrOnStream(sum.storage().data_ptr(), *there_);
    follow(*there_, *here_);
  }

 private:
  c10::impl::VirtualGuardImpl guard() const { return c10::impl::VirtualGuardImpl(there_->device_type()); }

  static void follow(const c10::Stream& later, const c10::Stream& earlier) {
    c10::Event event(earlier.device_type());
    event.record(earlier);
    event.block(later);
  }

  c10::optional<c10::Stream> there_;  // none where it is the calling thread's
  c10::optional<c10::Stream> here_;
};

// Whether the running backward only adds the leaf's gradient to the existing one.
bool is_only_added(Node& accumulator) {
  if (at::GradMode::is_enabled()) return false;
  if (!accumulator.tensor_pre_hooks().empty() || accumulator.tensor_post_acc_grad_hooks() != nullptr) return false;
  if (!accumulator.pre_hooks().empty() || !accumulator.post_hooks().empty()) return false;
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  if (asked == nullptr || asked->empty()) return true;
  const auto found = asked->find(&accumulator);
  return found != asked->end() && found->second.needed_ && found->second.captures_ == nullptr;
}

// Adds rows^T . input to the gradient of `leaf`.
void add_product(Node& accumulator, at::Tensor& leaf, const at::Tensor& rows, const at::Tensor& input) {
  std::lock_guard lock(Lock::of(accumulator));
  InStreamOf stream(accumulator, leaf);
  at::Tensor& sum = leaf.mutable_grad();
  const bool same_kind = rows.scalar_type() == leaf.scalar_type();
  if (sum.defined()) {
    same_kind ? sum.addmm_(rows.t(), input) : sum.add_(rows.t().mm(input));
  } else if (same_kind) {
    at::Tensor product = at::empty_like(leaf);
    at::mm_out(product, rows.t(), input);
    sum = product;
  } else {
    sum = at::empty_like(leaf).copy_(rows.t().mm(input));
  }
  stream.end(sum);
}

class Linear final : public torch::autograd::Function<Linear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const c10::optional<at::Tensor>& bias, at::ScalarType kind) {
    context->save_for_backward({input, weight});
    // What is unpacked for a saved leaf may be another tensor on the same storage, without its gradient.
    context->saved_data["weight"] = weight;
    context->saved_data["bias"] = bias.has_value();
    return at::linear(input, weight.to(kind), bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    // The kinds are those of forward.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &grad = grads[0];
    const at::Tensor rows = grad.reshape({-1, grad.size(-1)});
    at::Tensor by_input, by_weight, by_bias;
    if (context->needs_input_grad(0)) by_input = grad.matmul(weight.to(grad.scalar_type()));
    if (context->needs_input_grad(1)) {
      at::Tensor leaf = context->saved_data["weight"].toTensor();
      const auto accumulator = torch::autograd::impl::grad_accumulator(leaf);
      const at::Tensor flat = input.reshape({-1, input.size(-1)});
      if (is_only_added(*accumulator)) {
        add_product(*accumulator, leaf, rows, flat);
      } else {
        by_weight = rows.t().mm(flat).to(leaf.scalar_type());
      }
    }
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(2)) by_bias = rows.sum(0);
    return {by_input, by_weight, by_bias, at::Tensor()};
  }
};

at::Tensor apply(const at::Tensor& input, const at::Tensor& weight, const c10::optional<at::Tensor>& bias) {
  const auto device = weight.device().type();
  if (!at::autocast::is_autocast_enabled(device)) return Linear::apply(input, weight, bias, weight.scalar_type());
  // Casts like at::linear, except for the weight's copy: it is made within the layer and must not be cached for
  // others, whose gradients would be lost.
  const auto kind = at::autocast::get_autocast_dtype(device);
  const bool is_cast = weight.is_floating_point() && weight.scalar_type() != at::kDouble;
  return Linear::apply(at::autocast::cached_cast(kind, input, device), weight, at::autocast::cached_cast(kind, bias, device),
                       is_cast ? kind : weight.scalar_type());
}

}  // namespace
}  // namespace ssdtrain::models

extern "C" const char* ssdtrain_linear(const at::Tensor* input, const at::Tensor* weight, const at::Tensor* bias,
                                       at::Tensor** out) {
  return ssdtrain::models::guarded([&] {
    const auto maybe = bias == nullptr ? c10::optional<at::Tensor>() : c10::optional<at::Tensor>(*bias);
    *out = new at::Tensor(ssdtrain::models::apply(*input, *weight, maybe));
  });
}
