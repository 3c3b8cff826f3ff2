// A value whose gradients are known already.
//
// A loss that is computed in chunks computes its gradients along with its value, since the logits are gone afterwards.
// They wait in a node of the graph, outside of its saved tensors. Backward scales them by the gradient that comes in
// and hands them on: without a copy, unless the graph is to be used again.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <mutex>
#include <utility>

#include "shim.h"

namespace ssdtrain::models {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

class Known final : public Node {
 public:
  explicit Known(variable_list gradients) : gradients_(std::move(gradients)) {}

  variable_list apply(variable_list&& incoming) override {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "linear_cross_entropy cannot be differentiated twice: take cross-entropy of all logits at once");
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    const bool once = !torch::autograd::get_current_graph_task_keep_graph();
    variable_list scaled(gradients_.size());
    if (!incoming[0].defined()) return scaled;
    for (size_t i = 0; i < gradients_.size(); ++i) {
      if (!task_should_compute_output(i)) continue;
      scaled[i] = once ? gradients_[i].mul_(incoming[0]) : gradients_[i].mul(incoming[0]);
    }
    return scaled;
  }

  // Leaves autograd the only owner of what apply returned, so that a gradient can become a leaf's.
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    gradients_.clear();
    released_ = true;
  }

  std::string name() const override { return "KnownGradients"; }

 private:
  variable_list gradients_;
  bool released_ = false;
};

}  // namespace
}  // namespace ssdtrain::models

extern "C" bool ssdtrain_is_recorded(const at::Tensor* tensor) {
  return at::GradMode::is_enabled() && tensor->requires_grad();
}

extern "C" const char* ssdtrain_known(const at::Tensor* value, size_t count, const at::Tensor* const* inputs,
                                      const at::Tensor* const* gradients, at::Tensor** out) {
  return ssdtrain::models::guarded([&] {
    torch::autograd::variable_list kept;
    for (size_t i = 0; i < count; ++i) kept.push_back(*gradients[i]);
    const std::shared_ptr<ssdtrain::models::Node> node(new ssdtrain::models::Known(std::move(kept)),
                                                       torch::autograd::deleteNode);
    for (size_t i = 0; i < count; ++i) node->add_next_edge(torch::autograd::impl::gradient_edge(*inputs[i]));
    at::Tensor result = value->detach();
    torch::autograd::set_history(result, node);
    *out = new at::Tensor(std::move(result));
  });
}
