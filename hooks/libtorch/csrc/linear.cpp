// A linear layer whose weight's gradient is added to in place.
//
// Autograd's own makes a gradient as large as the weight and then adds it to the one that is there; of a wide layer that is
// as much memory as its activations. Here the product is accumulated straight into the gradient.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "guard.h"

namespace ssdtrain {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class Linear final : public torch::autograd::Function<Linear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const c10::optional<at::Tensor>& bias) {
    context->save_for_backward({input, weight});
    // What comes back of a saved leaf may be another tensor on its storage, without its gradient.
    context->saved_data["weight"] = weight;
    context->saved_data["bias"] = bias.has_value();
    return at::linear(input, weight, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &grad = grads[0];
    const at::Tensor rows = grad.reshape({-1, grad.size(-1)});
    at::Tensor by_input, by_bias;
    if (context->needs_input_grad(0)) by_input = grad.matmul(weight);
    if (context->needs_input_grad(1)) {
      at::Tensor leaf = context->saved_data["weight"].toTensor();
      at::Tensor& sum = leaf.mutable_grad();
      if (!sum.defined()) sum = at::zeros_like(weight);
      sum.addmm_(rows.t(), input.reshape({-1, input.size(-1)}));
    }
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(2)) by_bias = rows.sum(0);
    return {by_input, at::Tensor(), by_bias};
  }
};

const at::Tensor& tensor(const st_tensor* t) { return *reinterpret_cast<const at::Tensor*>(t); }

}  // namespace
}  // namespace ssdtrain

using namespace ssdtrain;

extern "C" st_status st_linear(const st_tensor* input, const st_tensor* weight, const st_tensor* bias, st_tensor** out) {
  return guarded([&] {
    const auto maybe = bias == nullptr ? c10::optional<at::Tensor>() : c10::optional<at::Tensor>(tensor(bias));
    *out = reinterpret_cast<st_tensor*>(new at::Tensor(Linear::apply(tensor(input), tensor(weight), maybe)));
  });
}
