#include "repeatable.h"

#include <algorithm>
#include <string_view>

#include "slots.h"

namespace ssdtrain {

namespace {

template <size_t N>
constexpr bool is_sorted(const std::string_view (&names)[N]) {
  for (size_t i = 1; i < N; ++i) {
    if (!(names[i - 1] < names[i])) return false;
  }
  return true;
}

template <size_t N>
bool is_in(const std::string_view (&names)[N], std::string_view name) {
  return std::binary_search(std::begin(names), std::end(names), name);
}

// Each element of the result is computed by itself, or copied; or each row is. What only fills memory is not among them:
// it is made to be written to, often through its address, as tch writes the elements of `Tensor::from_slice`.
constexpr std::string_view kElements[] = {
    "_fused_rms_norm", "_log_softmax", "_prelu_kernel", "_softmax", "_to_copy", "abs", "acos", "acosh", "add",
    "addcdiv", "addcmul", "arange", "asin", "asinh", "atan", "atan2", "atanh", "avg_pool2d", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "cat", "ceil", "clamp", "clamp_max", "clamp_min", "clone", "constant_pad_nd",
    "copysign", "cos", "cosh", "diagonal_copy", "diagonal_scatter", "div", "elu", "embedding", "eq", "erf",
    "erfc", "exp", "exp2", "expm1", "fill", "flip", "floor", "floor_divide", "fmod", "frac", "gather", "ge",
    "gelu", "glu", "gt", "hardsigmoid", "hardswish", "hardtanh", "heaviside", "hypot", "index_select", "isinf",
    "isnan", "le", "leaky_relu", "lerp", "lgamma", "log", "log10", "log1p", "log2", "logaddexp", "logical_and",
    "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "max_pool2d_with_indices", "maximum", "minimum", "mish", "mul",
    "nan_to_num", "native_layer_norm", "ne", "neg", "pixel_shuffle", "pixel_unshuffle", "pow", "reciprocal",
    "relu", "remainder", "repeat", "roll", "round", "rsqrt", "rsub", "select_scatter", "sigmoid", "sign",
    "silu", "sin", "sinc", "sinh", "slice_scatter", "softplus", "softshrink", "sqrt", "stack", "sub", "tan",
    "tanh", "threshold", "tril", "triu", "trunc", "upsample_nearest1d", "upsample_nearest2d", "where", "xlogy"};
// On a GPU the order of these sums does not change from run to run.
constexpr std::string_view kSums[] = {"amax", "amin", "mean", "sum", "var", "var_mean"};
constexpr std::string_view kProducts[] = {"addmm", "baddbmm", "bmm", "convolution", "mm"};

constexpr std::string_view kBenchmarked[] = {"_scaled_dot_product_cudnn_attention", "convolution", "cudnn_batch_norm"};

// The result comes first, then the logarithm of each row's sum, of which the efficient kernel does not write all that it
// allocates.
struct Attention {
  std::string_view name;
  size_t dropout;
  size_t results;
};
constexpr Attention kAttentions[] = {
    {"_scaled_dot_product_cudnn_attention", 5, 2},
    {"_scaled_dot_product_efficient_attention", 5, 1},
    {"_scaled_dot_product_flash_attention", 3, 2},
    {"_scaled_dot_product_flash_attention_for_cpu", 3, 2},
};

// Their schemas do not say that they write.
constexpr std::string_view kBatchNorms[] = {"cudnn_batch_norm", "native_batch_norm"};
constexpr size_t kStatistics = 3;
// What is normalized, the means and the reciprocal deviations.
constexpr size_t kNormResults = 3;

static_assert(is_sorted(kElements) && is_sorted(kSums) && is_sorted(kProducts) && is_sorted(kBenchmarked) && is_sorted(kBatchNorms),
              "looked up by bisection");

Repeatable look_at(const c10::FunctionSchema& schema) {
  Repeatable of;
  of.schema = &schema;
  std::string_view name = schema.name();
  constexpr std::string_view space = "aten::";
  if (name.substr(0, space.size()) != space) return of;
  name.remove_prefix(space.size());
  for (const c10::Argument& argument : schema.arguments()) {
    const auto list = argument.type()->cast<c10::ListType>();
    const bool has_gaps = list != nullptr && list->getElementType()->kind() == c10::TypeKind::OptionalType;
    if (argument.alias_info() != nullptr || argument.name() == "generator" || has_gaps) return of;
  }
  for (const c10::Argument& result : schema.returns()) {
    if (result.alias_info() != nullptr) return of;
  }
  of.is_certain = is_in(kElements, name) || is_in(kSums, name);
  if (is_in(kProducts, name)) of.is_certain = of.by_flags = true;
  of.by_benchmark = is_in(kBenchmarked, name);
  if (is_in(kBatchNorms, name)) {
    of.is_certain = of.by_flags = true;
    of.results = kNormResults;
    of.statistics = kStatistics;
  }
  for (const Attention& one : kAttentions) {
    if (one.name != name) continue;
    of.is_certain = of.by_flags = true;
    of.results = one.results;
    of.dropout = one.dropout;
  }
  return of;
}

}  // namespace

// A schema keeps its address for as long as its operator is registered.
const Repeatable& repeatable(const c10::OperatorHandle& op) {
  const c10::FunctionSchema* schema = &op.schema();
  auto& slot = slot_of<Repeatable>(schema, 6);
  if (slot.schema != schema) slot = look_at(*schema);
  return slot;
}

}  // namespace ssdtrain
