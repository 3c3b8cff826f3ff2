// The states of the default generators: they determine the random numbers that a computation will draw.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "guard.h"

namespace {

// The CPU generator's state, field by field: getting it as a tensor would take twenty times as long.
class CpuState final {
 public:
  CpuState() : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    auto* of = generator_.get<at::CPUGeneratorImpl>();
    engine_ = of->engine();
    float_ = of->next_float_normal_sample();
    double_ = of->next_double_normal_sample();
  }

  void restore() const {
    at::Generator generator = generator_;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    auto* to = generator.get<at::CPUGeneratorImpl>();
    to->set_engine(engine_);
    to->set_next_float_normal_sample(float_);
    to->set_next_double_normal_sample(double_);
  }

  bool operator==(const CpuState& other) const {
    const auto ours = engine_.data(), theirs = other.engine_.data();
    return ours.seed_ == theirs.seed_ && ours.left_ == theirs.left_ && ours.seeded_ == theirs.seeded_ &&
           ours.next_ == theirs.next_ && ours.state_ == theirs.state_ && float_ == other.float_ &&
           double_ == other.double_;
  }

 private:
  at::Generator generator_;
  at::mt19937 engine_;
  std::optional<float> float_;
  std::optional<double> double_;
};

// Any other generator.
class State final {
 public:
  explicit State(c10::Device device) : generator_(at::globalContext().defaultGenerator(device)) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    state_ = generator_.get_state();
  }

  void restore() const {
    at::Generator generator = generator_;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state_);
  }

  bool operator==(const State& other) const {
    return generator_ == other.generator_ && state_.nbytes() == other.state_.nbytes() &&
           std::memcmp(state_.const_data_ptr(), other.state_.const_data_ptr(), state_.nbytes()) == 0;
  }

 private:
  at::Generator generator_;
  at::Tensor state_;
};

struct Random {
  CpuState cpu;
  std::vector<State> devices;
};

const Random& random(const st_random* r) { return *reinterpret_cast<const Random*>(r); }

}  // namespace

extern "C" {

st_status st_random_of(const int8_t* cuda, size_t count, st_random** out) {
  return ssdtrain::guarded([&] {
    auto found = std::make_unique<Random>();
    for (size_t i = 0; i < count; ++i) {
      found->devices.emplace_back(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(cuda[i])));
    }
    *out = reinterpret_cast<st_random*>(found.release());
  });
}

st_status st_random_restore(const st_random* r) {
  return ssdtrain::guarded([&] {
    random(r).cpu.restore();
    for (const State& state : random(r).devices) state.restore();
  });
}

bool st_random_same(const st_random* left, const st_random* right) {
  return random(left).cpu == random(right).cpu && random(left).devices == random(right).devices;
}

void st_random_free(st_random* r) { delete reinterpret_cast<Random*>(r); }

}  // extern "C"
