#include "operations.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>
#include <string>
#include <string_view>

#include "forks.h"
#include "slots.h"

namespace ssdtrain {

namespace {

// Handles batch normalisation: most of its schemas do not say that they write.
void statistics_of(std::string_view name, Operation& of) {
  struct Known {
    std::string_view name;
    size_t mean;
    size_t training;
  };
  constexpr size_t kAlways = 0;
  static constexpr Known known[] = {
      {"aten::batch_norm", 3, 5},          {"aten::_batch_norm_impl_index", 3, 5},
      {"aten::native_batch_norm", 3, 5},   {"aten::cudnn_batch_norm", 3, 5},
      {"aten::miopen_batch_norm", 3, 5},   {"aten::_native_batch_norm_legit", 3, 5},
      {"aten::_batch_norm_with_update", 3, kAlways}, {"aten::batch_norm_update_stats", 1, kAlways},
      {"aten::batch_norm_gather_stats", 3, kAlways}, {"aten::batch_norm_gather_stats_with_counts", 3, kAlways},
  };
  for (const Known& one : known) {
    if (one.name != name) continue;
    of.statistics = bit(one.mean) | bit(one.mean + 1);
    of.training = one.training;
    of.passes_over_empty = name == "aten::batch_norm" || name == "aten::_batch_norm_impl_index";
    // Schemas that do say so say it for evaluation too.
    of.written &= ~of.statistics;
    of.written_after_saving &= ~of.statistics;
  }
}

// Whether the operator changes which bytes a tensor shows, not the bytes.
bool changes_view(const c10::OperatorName& name) {
  const std::lock_guard lock(operators_lock());
  const auto handle = c10::Dispatcher::singleton().findSchema(name);
  return handle.has_value() && handle->hasTag(at::Tag::inplace_view);
}

Operation operation_of(const at::RecordFunction& call) {
  Operation of;
  of.name = call.name();
  const auto schema = call.operator_schema();
  if (!schema.has_value()) return of;
  const std::string& name = schema->name();
  // These change only the shape, or whether gradients are wanted; no byte changes.
  static constexpr std::string_view harmless[] = {"aten::requires_grad_", "aten::retain_grad", "aten::set_data"};
  for (const std::string_view one : harmless) {
    if (name == one) return of;
  }
  const bool resizes = name.rfind("aten::resize_", 0) == 0;
  if (!resizes && changes_view(schema->operator_name())) return of;
  const bool in_place = name.back() == '_';
  const auto& arguments = schema->arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* alias = arguments[i].alias_info();
    if (alias == nullptr) continue;
    if (!alias->isWrite()) {
      of.viewed |= bit(i);
      continue;
    }
    of.written |= bit(i);
    if (!in_place || i > 0) of.written_after_saving |= bit(i);
  }
  statistics_of(name, of);
  return of;
}

}  // namespace

// The name of a schema keeps its own address for as long as the process lives.
const Operation& known(const at::RecordFunction& call) {
  const char* name = call.name();
  auto& slot = slot_of<Operation>(name, 4);
  if (slot.name != name) slot = operation_of(call);
  return slot;
}

uint64_t statistics_in(const Operation& operation, c10::ArrayRef<const c10::IValue> arguments) {
  if (operation.statistics == 0 || operation.training == 0) return operation.statistics;
  const bool told = operation.training < arguments.size() && arguments[operation.training].isBool();
  return told && !arguments[operation.training].toBool() ? 0 : operation.statistics;
}

uint64_t statistics_written_in(const Operation& operation, c10::ArrayRef<const c10::IValue> arguments) {
  const bool is_empty = operation.passes_over_empty && arguments[0].isTensor() && arguments[0].toTensor().numel() == 0;
  return is_empty ? 0 : statistics_in(operation, arguments);
}

c10::StorageImpl* storage_of(const at::Tensor& t) {
  const auto of = [](const at::Tensor& strided) {
    return strided.defined() && strided.has_storage() ? strided.storage().unsafeGetStorageImpl() : nullptr;
  };
  if (!t.defined()) return nullptr;
  // A sparse tensor keeps its values alive.
  if (t.is_sparse()) return of(static_cast<at::SparseTensorImpl*>(t.unsafeGetTensorImpl())->values());
  const auto layout = t.layout();
  const bool is_compressed =
      layout == at::kSparseCsr || layout == at::kSparseCsc || layout == at::kSparseBsr || layout == at::kSparseBsc;
  if (is_compressed) return of(static_cast<at::SparseCsrTensorImpl*>(t.unsafeGetTensorImpl())->values());
  return of(t);
}

c10::intrusive_ptr<c10::StorageImpl> shared_storage_of(const at::Tensor& t) {
  return c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(storage_of(t));
}

Span span_of(const at::Tensor& t) {
  if (t.layout() != at::kStrided || t.is_nested()) return Span{};
  size_t elements = t.numel() == 0 ? 0 : 1;
  for (int64_t i = 0; elements != 0 && i < t.dim(); ++i) elements += (t.size(i) - 1) * t.stride(i);
  const size_t from = t.storage_offset() * t.itemsize();
  return Span{from, from + elements * t.itemsize()};
}

}  // namespace ssdtrain
