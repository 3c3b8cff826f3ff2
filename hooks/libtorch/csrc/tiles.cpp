// Recorded operations of the CPU, run one after another on parts of what they read that stay in its caches.
#include <ATen/ATen.h>
#include <ATen/TensorIterator.h>
#include <ATen/record_function.h>

#include <atomic>
#include <cstring>
#include <vector>

#include "guard.h"
#include "recorded.h"
#include "threads.h"

using namespace ssdtrain;

namespace {

using torch::jit::Stack;

const Recorded& recorded_of(const st_step& step) { return *reinterpret_cast<const Recorded*>(step.operation); }

c10::Storage storage_of(const st_storage* storage) {
  auto* of = const_cast<StorageImpl*>(reinterpret_cast<const StorageImpl*>(storage));
  return c10::Storage(c10::intrusive_ptr<StorageImpl>::unsafe_reclaim_from_nonowning(of));
}

// The operand of a recorded operation that is this argument.
const Operand& operand_of(const Recorded& recorded, size_t argument) {
  for (const Operand& operand : recorded.operands) {
    if (operand.argument == argument && operand.element < 0) return operand;
  }
  TORCH_CHECK(false, "internal error: ", recorded.op.schema().name(), " has no tensor as argument ", argument);
}

class Tiles final {
 public:
  Tiles(const st_tiling& tiling, const st_step* steps, size_t count, bool compares)
      : tiling_(tiling), steps_(steps), count_(count), compares_(compares), last_uses_(count) {
    bool is_too_much = false;
    for (size_t i = 0; i < tiling.dimensions; ++i) {
      is_too_much |= tiling.sizes[i] <= 0 || __builtin_mul_overflow(elements_, tiling.sizes[i], &elements_);
      if (i < tiling.split) inner_ = elements_;
    }
    TORCH_CHECK(!is_too_much && tiling.split < tiling.dimensions, "internal error: tiles of nothing, or of too much");
    check();
  }

  bool has_differed() const { return differs_; }

  void run() {
    const Below autograd;
    const at::DisableRecordFunctionGuard unseen;
    const Threads threads(tiling_.threads);
    // libtorch's parallel loops are compiled into those who include them, and have its threads only within libtorch.
    const at::Tensor numbers = at::arange(static_cast<int64_t>(tiling_.shares), at::kLong);
    at::TensorIterator::borrowing_nullary_op(numbers).for_each(
        [this](char** data, const int64_t* strides, int64_t count, int64_t /*in one dimension*/) {
          const Below autograd;
          const at::DisableRecordFunctionGuard unseen;
          for (int64_t i = 0; i < count; ++i) share(*reinterpret_cast<const int64_t*>(data[0] + i * strides[0]));
        },
        /*grain_size=*/1);
  }

 private:
  void check() {
    const int64_t rows = tiling_.sizes[tiling_.split];
    for (size_t i = 0; i < tiling_.tiles_count; ++i) {
      const st_tile& tile = tiling_.tiles[i];
      TORCH_CHECK(tile.first >= 0 && tile.first < elements_ && tile.first % inner_ == 0 && tile.rows > 0 &&
                      tile.rows <= rows - tile.first / inner_ % rows,
                  "internal error: a tile beyond the elements");
    }
    for (size_t i = 0; i < tiling_.shares; ++i) {
      TORCH_CHECK(tiling_.ends[i] <= tiling_.tiles_count, "internal error: a share of tiles that are not there");
    }
    for (size_t i = 0; i < count_; ++i) {
      const Recorded& recorded = recorded_of(steps_[i]);
      TORCH_CHECK(recorded.device.is_cpu() && recorded.results.size() == 1, "internal error: not to be run in tiles");
      const size_t itemsize = recorded.results[0].view.dtype.itemsize();
      const auto elements = static_cast<size_t>(elements_);
      TORCH_CHECK(steps_[i].output == nullptr || storage_of(steps_[i].output).nbytes() / itemsize >= elements,
                  "internal error: no room for what tiles make");
      for (size_t j = 0; j < steps_[i].count; ++j) check(recorded, steps_[i].operands[j], i);
    }
  }

  void check(const Recorded& recorded, const st_part& operand, size_t step) {
    const View& view = operand_of(recorded, operand.argument).view;
    if (operand.storage == nullptr) {
      TORCH_CHECK(operand.step < step, "internal error: a step reads a later one");
      last_uses_[operand.step] = step;
      return;
    }
    const auto room = static_cast<int64_t>(storage_of(operand.storage).nbytes() / view.dtype.itemsize());
    int64_t last = operand.offset;
    bool is_within = operand.offset >= 0;
    for (size_t i = 0; i < tiling_.dimensions; ++i) {
      int64_t reach = 0;
      is_within &= operand.strides[i] >= 0 && !__builtin_mul_overflow(tiling_.sizes[i] - 1, operand.strides[i], &reach) &&
                   !__builtin_add_overflow(last, reach, &last);
    }
    TORCH_CHECK(is_within && last < room, "internal error: tiles would read beyond a storage");
  }

  void share(int64_t number) {
    const size_t end = tiling_.ends[number];
    for (size_t i = number == 0 ? 0 : tiling_.ends[number - 1]; i < end && !differs_; ++i) tile(tiling_.tiles[i]);
  }

  void tile(const st_tile& tile) {
    c10::DimVector sizes{tile.rows};
    for (size_t i = tiling_.split; i-- > 0;) sizes.push_back(tiling_.sizes[i]);
    c10::SmallVector<at::Tensor, 8> made(count_);
    for (size_t i = 0; i < count_; ++i) {
      const st_step& step = steps_[i];
      const Recorded& recorded = recorded_of(step);
      Stack stack(recorded.arguments.begin(), recorded.arguments.end());
      for (size_t j = 0; j < step.count; ++j) {
        const st_part& operand = step.operands[j];
        stack[operand.argument] = operand.storage != nullptr ? part(recorded, operand, tile, sizes) : made[operand.step];
        if (operand.storage == nullptr && last_uses_[operand.step] == i) made[operand.step].reset();
      }
      recorded.op.callBoxed(stack);
      at::Tensor result = std::move(stack.at(recorded.results[0].place)).toTensor();
      TORCH_CHECK(result.sizes() == sizes && result.is_contiguous() && result.dtype() == recorded.results[0].view.dtype,
                  recorded.op.schema().name(), " gave a tensor of another shape for a tile");
      if (step.output != nullptr) settle(result, step.output, tile.first);
      if (last_uses_[i] > i) made[i] = std::move(result);
    }
  }

  // What a step reads of a storage.
  at::Tensor part(const Recorded& recorded, const st_part& operand, const st_tile& tile, const c10::DimVector& sizes) const {
    const View& view = operand_of(recorded, operand.argument).view;
    const auto on = [&](c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
      auto t = at::detail::make_tensor<c10::TensorImpl>(storage_of(operand.storage), view.keys, view.dtype);
      t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
      return t;
    };
    // Operations treat one number by itself, and those without dimensions differently again.
    if (c10::multiply_integers(view.sizes) == 1) {
      const size_t rank = view.sizes.empty() ? 0 : 1;
      return on(c10::DimVector(rank, 1), c10::DimVector(rank, 1), operand.offset);
    }
    int64_t offset = operand.offset;
    int64_t position = tile.first / inner_;
    for (size_t i = tiling_.split; i < tiling_.dimensions; ++i) {
      offset += position % tiling_.sizes[i] * operand.strides[i];
      position /= tiling_.sizes[i];
    }
    c10::DimVector strides;
    for (size_t i = tiling_.split + 1; i-- > 0;) strides.push_back(operand.strides[i]);
    return on(sizes, strides, offset);
  }

  void settle(const at::Tensor& result, const st_storage* output, int64_t first) {
    char* place = static_cast<char*>(storage_of(output).data_ptr().get()) + first * result.itemsize();
    if (!compares_) {
      std::memcpy(place, result.const_data_ptr(), result.nbytes());
    } else if (std::memcmp(place, result.const_data_ptr(), result.nbytes()) != 0) {
      differs_ = true;
    }
  }

  const st_tiling& tiling_;
  const st_step* steps_;
  size_t count_;
  bool compares_;
  std::vector<size_t> last_uses_;  // the last step that reads what a step makes
  int64_t elements_ = 1;
  int64_t inner_ = 1;  // elements of a row
  std::atomic<bool> differs_{false};
};

}  // namespace

extern "C" {

st_status st_tiles_run(const st_tiling* tiling, const st_step* steps, size_t count) {
  return guarded([&] { Tiles(*tiling, steps, count, /*compares=*/false).run(); });
}

st_status st_tiles_compare(const st_tiling* tiling, const st_step* steps, size_t count, bool* differs) {
  return guarded([&] {
    Tiles tiles(*tiling, steps, count, /*compares=*/true);
    tiles.run();
    *differs = tiles.has_differed();
  });
}

}  // extern "C"
