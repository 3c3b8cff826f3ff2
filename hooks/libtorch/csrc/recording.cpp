// Operations on record: what made a tensor, so that it can be made again.
//
// Right below autograd, libtorch's dispatcher has a key that nothing in libtorch uses (`DispatchKey::Fake`, kept for
// code outside of it). A thread that records includes it, so the fallback below sees each operation with the very
// tensors that autograd saves. It excludes itself while the operation runs: operations within an operation are not
// recorded.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "forks.h"
#include "guard.h"
#include "plain.h"
#include "recorded.h"
#include "repeatable.h"
#include "threads.h"
#include "watches.h"

using namespace ssdtrain;

namespace {

using torch::jit::Stack;

// Global settings that products of matrices depend on.
uint64_t flags_now(bool by_benchmark) {
  const at::Context& context = at::globalContext();
  uint64_t flags = 1;
  const auto add = [&](uint64_t value) { flags = flags * 16 + value; };
  add(static_cast<uint64_t>(context.float32MatmulPrecision()));
  add(context.allowTF32CuBLAS());
  add(context.allowTF32CuDNN());
  add(static_cast<uint64_t>(context.allowFP16ReductionCuBLAS()));
  add(static_cast<uint64_t>(context.allowBF16ReductionCuBLAS()));
  add(context.deterministicAlgorithms());
  add(context.deterministicCuDNN());
  add(by_benchmark && context.benchmarkCuDNN());
  add(context.userEnabledCuDNN());
  add(context.userEnabledMkldnn());
  return flags;
}

int64_t stream_of(c10::Device device) {
  if (device.is_cpu()) return 0;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

size_t place_of(const at::Tensor& t, Records& storages) {
  const StorageImpl* address = t.storage().unsafeGetStorageImpl();
  size_t place = 0;
  while (place < storages.size() && storages[place].address() != address) ++place;
  if (place == storages.size()) storages.emplace_back(t);
  return place;
}

struct Maker {
  c10::intrusive_ptr<Recorded> by;
  size_t storage;
};

// What one thread of a step has recorded.
struct Strand {
  uint32_t number = 0;
  // Only its thread counts.
  uint64_t count = 0;
  // By the address of what was made, of which the operation holds a weak reference.
  std::unordered_map<const StorageImpl*, Maker> makers;
};

// The calling thread's number, which no other thread of the process ever has.
uint64_t this_thread() {
  static std::atomic<uint64_t> threads{0};
  thread_local const uint64_t number = threads++;
  return number;
}

// What the threads of a step have recorded.
struct Recording {
  std::mutex mutex;
  uint64_t count = 0;
  std::unordered_map<uint64_t, Strand> strands;
  uint64_t (*stamp)(const void* context) = nullptr;
  const void* context = nullptr;

  // That of the calling thread.
  Strand& strand() {
    std::lock_guard lock(mutex);
    const auto [place, is_new] = strands.try_emplace(this_thread());
    if (is_new) place->second.number = static_cast<uint32_t>(strands.size() - 1);
    return place->second;
  }

  // What made a storage, as it was at `generation`.
  Maker maker_of(const StorageImpl* storage, uint32_t generation) {
    std::lock_guard lock(mutex);
    for (const auto& [_, strand] : strands) {
      const auto place = strand.makers.find(storage);
      if (place == strand.makers.end()) continue;
      const Maker& maker = place->second;
      if (maker.by->made[maker.storage].generation == generation) return maker;
    }
    return {};
  }
};

thread_local Recording* active = nullptr;
// The active recording's strand of this thread.
thread_local Strand* own = nullptr;

// The operation with its arguments; null if it is not known to be repeatable with them.
c10::intrusive_ptr<Recorded> begin(const c10::OperatorHandle& op, const Repeatable& known, const Stack& stack) {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  if (known.dropout < arguments.size() && arguments[known.dropout].toDouble() != 0.0) return {};
  auto recorded = c10::make_intrusive<Recorded>(op);
  bool is_first = true;
  const auto read = [&](const at::Tensor& t, size_t argument, int64_t element) {
    if (!is_plain(t) || t.is_inference()) return false;
    // Numbers of the CPU may be operands of a device's operations. What is copied from one device to another may be
    // written by others than operations.
    if (t.dim() > 0) {
      if (!is_first && recorded->device != t.device()) return false;
      recorded->device = t.device();
      is_first = false;
    }
    recorded->operands.push_back(Operand{argument, element, place_of(t, recorded->read), View(t)});
    return true;
  };
  const bool updates = known.statistics < arguments.size() && arguments[known.statistics + 2].toBool();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& argument = arguments[i];
    const at::Tensor* t = argument.isTensor() ? &argument.toTensor() : nullptr;
    if (updates && (i == known.statistics || i == known.statistics + 1) && t != nullptr && t->defined()) {
      recorded->statistics.push_back(Statistic{i, View(*t)});
      recorded->arguments.emplace_back();
    } else if (t != nullptr && t->defined() && !t->unsafeGetTensorImpl()->is_wrapped_number()) {
      if (!read(*t, i, -1)) return {};
      recorded->arguments.emplace_back();
    } else if (argument.isTensorList()) {
      int64_t element = 0;
      for (const at::Tensor& one : argument.toTensorVector()) {
        if (!read(one, i, element++)) return {};
      }
      recorded->arguments.emplace_back();
    } else {
      recorded->arguments.push_back(argument);
    }
  }
  const bool by_benchmark = known.by_benchmark && recorded->device.is_cuda();
  if (by_benchmark && at::globalContext().benchmarkCuDNN()) return {};
  if (known.by_flags) recorded->flags = flags_now(by_benchmark);
  return recorded;
}

// The operation has run, and its results are on the stack.
void end(Recording& recording, Strand& strand, c10::intrusive_ptr<Recorded> recorded, const Stack& stack) {
  const auto results = torch::jit::last(stack, recorded->op.schema().returns().size());
  const size_t certain = std::min(repeatable(recorded->op).results, results.size());
  for (size_t i = 0; i < certain; ++i) {
    if (!results[i].isTensor() || !results[i].toTensor().defined() || !is_plain(results[i].toTensor())) continue;
    const at::Tensor& t = results[i].toTensor();
    // What a norm has no statistics for.
    if (i > 0 && t.numel() == 0) continue;
    // A view of an argument has no bytes of its own.
    for (const Record& read : recorded->read) {
      if (read.address() == t.storage().unsafeGetStorageImpl()) return;
    }
    if (recorded->read.empty()) recorded->device = t.device();
    if (recorded->device != t.device()) return;
    recorded->results.push_back(Result{i, place_of(t, recorded->made), View(t)});
  }
  recorded->threads = at::get_num_threads();
  recorded->stream = stream_of(recorded->device);
  recorded->strand = strand.number;
  recorded->index = strand.count++;
  std::lock_guard lock(recording.mutex);
  recorded->number = recording.count++;
  for (size_t storage = 0; storage < recorded->made.size(); ++storage) {
    strand.makers[recorded->made[storage].address()] = Maker{recorded, storage};
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Fake);
  const c10::impl::ExcludeDispatchKeyGuard within(c10::DispatchKey::Fake);
  Recording* recording = active;
  Strand* strand = own;
  c10::intrusive_ptr<Recorded> recorded;
  // Functions with a backward of their own, whose results others save, compute them without gradients.
  const bool is_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (recording != nullptr && !is_backward && !c10::InferenceMode::is_enabled()) {
    const Repeatable& known = repeatable(op);
    if (known.is_certain) recorded = begin(op, known, *stack);
  }
  if (!recorded) return op.redispatchBoxed(below, stack);
  const bool is_timed = recording->stamp != nullptr;
  if (is_timed) recorded->begun = recording->stamp(recording->context);
  op.redispatchBoxed(below, stack);
  if (is_timed) recorded->ended = recording->stamp(recording->context);
  end(*recording, *strand, std::move(recorded), *stack);
}

// The key can have only one fallback, which stays for as long as the process lives.
void install() {
  const std::lock_guard lock(operators_lock());
  // Kept, so that checkers of leaks find it.
  [[gnu::used]] static torch::Library* library = [] {
    auto made = std::make_unique<torch::Library>(torch::Library::IMPL, "_", c10::DispatchKey::Fake, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    return made.release();
  }();
}

// Runs an operation again. `storages` are what it read, in the order of `read`.
void repeat(const Recorded& recorded, st_storage* const* storages, st_storage** out) {
  const bool by_benchmark = recorded.device.is_cuda() && repeatable(recorded.op).by_benchmark;
  TORCH_CHECK(recorded.flags == 0 || recorded.flags == flags_now(by_benchmark),
              "settings such as TF32 or deterministic algorithms were changed between forward and backward");
  Stack stack(recorded.arguments.begin(), recorded.arguments.end());
  std::unordered_map<size_t, c10::List<at::Tensor>> lists;
  for (const Operand& operand : recorded.operands) {
    auto* storage = reinterpret_cast<StorageImpl*>(storages[operand.storage]);
    const auto t = operand.view.on(c10::Storage(c10::intrusive_ptr<StorageImpl>::unsafe_reclaim_from_nonowning(storage)));
    if (operand.element < 0) {
      stack[operand.argument] = t;
    } else {
      lists[operand.argument].push_back(t);
    }
  }
  for (auto& [argument, list] : lists) stack[argument] = std::move(list);
  {
    const Below autograd;
    const Threads threads(recorded.device.is_cpu() ? recorded.threads : at::get_num_threads());
    for (const Statistic& statistic : recorded.statistics) {
      // How a kernel computes, and so its bits, may depend on how they lie in memory.
      const auto options = at::TensorOptions(recorded.device).dtype(statistic.view.dtype);
      stack[statistic.argument] = at::empty_strided(statistic.view.sizes, statistic.view.strides, options);
    }
    recorded.op.callBoxed(stack);
  }
  for (const Result& result : recorded.results) {
    const at::Tensor& t = stack.at(result.place).toTensor();
    TORCH_CHECK(result.view.is_of(t) && t.storage().nbytes() == recorded.made[result.storage].bytes, recorded.op.schema().name(),
                " gave a tensor of another shape when it was run again");
    st_storage*& place = out[result.storage];
    if (place != nullptr) continue;
    place = reinterpret_cast<st_storage*>(c10::Storage(t.storage()).unsafeReleaseStorageImpl());
  }
}

const Recorded& recorded_of(const st_recorded* recorded) { return *reinterpret_cast<const Recorded*>(recorded); }
Recording& recording_of(st_operations* recording) { return *reinterpret_cast<Recording*>(recording); }

st_touched record_of(const Record& record) {
  const c10::Device device = record.address()->device();
  return {reinterpret_cast<st_storage*>(record.address()), record.bytes, record.version, static_cast<int8_t>(device.type()),
          static_cast<int8_t>(device.index()), record.is_unwritten()};
}

st_view view_of(size_t storage, const View& view) {
  const auto device = view.keys.has(c10::DispatchKey::CPU) ? c10::kCPU : c10::kCUDA;
  return {storage, static_cast<int8_t>(view.dtype.toScalarType()), static_cast<int8_t>(device),
          view.offset, view.sizes.size(), view.sizes.data(), view.strides.data()};
}

st_argument number_of(const c10::Scalar& number) {
  if (number.isBoolean()) return {ST_ARGUMENT_TRUTH, number.toBool(), 0.0, nullptr, {}};
  if (number.isIntegral(/*includeBool=*/false)) return {ST_ARGUMENT_INTEGER, number.toLong(), 0.0, nullptr, {}};
  if (number.isFloatingPoint()) return {ST_ARGUMENT_REAL, 0, number.toDouble(), nullptr, {}};
  return {};
}

st_argument argument_of(const Recorded& recorded, size_t argument) {
  st_argument of{};
  for (const Operand& operand : recorded.operands) {
    if (operand.argument != argument) continue;
    if (operand.element >= 0) return of;  // a list
    of.form = ST_ARGUMENT_TENSOR;
    of.view = view_of(operand.storage, operand.view);
    return of;
  }
  const c10::IValue& value = recorded.arguments[argument];
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu() && value.toTensor().numel() == 1) {
    return number_of(value.toTensor().item());
  }
  if (value.isScalar()) return number_of(value.toScalar());
  if (value.isNone()) of.form = ST_ARGUMENT_NONE;
  if (value.isString()) {
    of.form = ST_ARGUMENT_TEXT;
    of.text = value.toStringRef().c_str();
  }
  return of;
}

void give(Maker maker, st_recorded** by, size_t* storage) {
  *storage = maker.storage;
  *by = reinterpret_cast<st_recorded*>(maker.by.release());
}

}  // namespace

extern "C" {

st_status st_operations_new(st_operations** out) {
  return guarded([&] {
    install();
    *out = reinterpret_cast<st_operations*>(new Recording);
  });
}

void st_operations_free(st_operations* recording) { delete &recording_of(recording); }

void st_operations_time(st_operations* recording, uint64_t (*stamp)(const void* context), const void* context) {
  recording_of(recording).stamp = stamp;
  recording_of(recording).context = context;
}

st_operations* st_operations_exchange(st_operations* recording) {
  auto* before = active;
  active = reinterpret_cast<Recording*>(recording);
  own = active == nullptr ? nullptr : &active->strand();
  c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::Fake, active != nullptr);
  return reinterpret_cast<st_operations*>(before);
}

st_position st_operations_position(st_operations* recording) {
  const bool is_active = active == &recording_of(recording);
  const Strand& strand = is_active ? *own : recording_of(recording).strand();
  return {strand.number, strand.count};
}

void st_operations_clear(st_operations* recording, int64_t number) {
  std::vector<std::unordered_map<const StorageImpl*, Maker>> gone;
  std::lock_guard lock(recording_of(recording).mutex);
  for (auto& [_, strand] : recording_of(recording).strands) {
    if (number < 0 || strand.number == number) gone.emplace_back().swap(strand.makers);
  }
}

void st_operations_maker(st_operations* recording, const st_storage* storage, st_recorded** by, size_t* made) {
  const auto* address = reinterpret_cast<const StorageImpl*>(storage);
  Maker maker = recording_of(recording).maker_of(address, generation_of(address));
  if (maker.by && maker.by->stream != stream_of(maker.by->device)) maker = {};
  give(std::move(maker), by, made);
}

void st_recorded_maker(const st_recorded* recorded, size_t read, st_operations* recording, st_recorded** by, size_t* made) {
  const Record& record = recorded_of(recorded).read[read];
  give(recording_of(recording).maker_of(record.address(), record.generation), by, made);
}

void st_recorded_retain(st_recorded* recorded) { c10::raw::intrusive_ptr::incref(reinterpret_cast<Recorded*>(recorded)); }
void st_recorded_release(st_recorded* recorded) { c10::raw::intrusive_ptr::decref(reinterpret_cast<Recorded*>(recorded)); }

st_description st_recorded_describe(const st_recorded* of) {
  const Recorded& recorded = recorded_of(of);
  return {recorded.op.schema().name().c_str(), recorded.number, recorded.index, recorded.strand, recorded.read.size(), recorded.made.size(), recorded.begun, recorded.ended,
          stream_of(recorded.device) == recorded.stream, recorded.device.is_cpu() ? recorded.threads : 0};
}

st_touched st_recorded_read(const st_recorded* recorded, size_t read) {
  return record_of(recorded_of(recorded).read[read]);
}

st_touched st_recorded_made(const st_recorded* recorded, size_t made) {
  return record_of(recorded_of(recorded).made[made]);
}

st_call st_recorded_call(const st_recorded* of) {
  const Recorded& recorded = recorded_of(of);
  return {recorded.op.schema().overload_name().c_str(), recorded.arguments.size(), recorded.results.size()};
}

st_argument st_recorded_argument(const st_recorded* recorded, size_t argument) {
  return argument_of(recorded_of(recorded), argument);
}

st_view st_recorded_result(const st_recorded* recorded, size_t result) {
  const Result& of = recorded_of(recorded).results[result];
  return view_of(of.storage, of.view);
}

st_status st_recorded_repeat(const st_recorded* recorded, st_storage* const* storages, st_storage** out) {
  return guarded([&] { repeat(recorded_of(recorded), storages, out); });
}

}  // extern "C"
