// The default generators' states: what random numbers a computation will draw.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "guard.h"

namespace {

struct Random {
  std::vector<std::pair<at::Generator, at::Tensor>> states;
};

const Random& random(const st_random* r) { return *reinterpret_cast<const Random*>(r); }

at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

extern "C" {

st_status st_random_of(const int8_t* cuda, size_t count, st_random** out) {
  return ssdtrain::guarded([&] {
    auto found = std::make_unique<Random>();
    const auto add = [&](c10::Device device) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      at::Tensor state = state_of(generator);
      found->states.emplace_back(std::move(generator), std::move(state));
    };
    add(c10::Device(c10::DeviceType::CPU));
    for (size_t i = 0; i < count; ++i) {
      add(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(cuda[i])));
    }
    *out = reinterpret_cast<st_random*>(found.release());
  });
}

st_status st_random_restore(const st_random* r) {
  return ssdtrain::guarded([&] {
    for (const auto& [generator, state] : random(r).states) {
      at::Generator shared = generator;
      const std::lock_guard<std::mutex> lock(shared.mutex());
      shared.set_state(state);
    }
  });
}

bool st_random_same(const st_random* left, const st_random* right) {
  const auto &ours = random(left).states, &theirs = random(right).states;
  if (ours.size() != theirs.size()) return false;
  for (size_t i = 0; i < ours.size(); ++i) {
    const at::Tensor &a = ours[i].second, &b = theirs[i].second;
    if (ours[i].first != theirs[i].first || a.nbytes() != b.nbytes() ||
        std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) != 0) {
      return false;
    }
  }
  return true;
}

void st_random_free(st_random* r) { delete reinterpret_cast<Random*>(r); }

}  // extern "C"
