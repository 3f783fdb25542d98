#include "training.hpp"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>

namespace accelmgr::test {
namespace {

constexpr double patience_s = 60;  // Longer than any wait on a loaded machine; only a failing test gets here.
constexpr float learning_rate = 0.01F, decay_of_momentum = 0.9F;

float* floats(Tensor& tensor) { return reinterpret_cast<float*>(tensor.bytes.data()); }

}  // namespace

void expect_same(const Outcome& actual, const Outcome& expected) {
  EXPECT_TRUE(same_bits(actual.parameters, expected.parameters));
  EXPECT_TRUE(same_bits(actual.gradients, expected.gradients));
  EXPECT_TRUE(same_bits(actual.buffers, expected.buffers));
  EXPECT_TRUE(same_bits(actual.optimizer, expected.optimizer));
  EXPECT_EQ(actual.steps, expected.steps);
  EXPECT_EQ(actual.samples, expected.samples);
  EXPECT_EQ(actual.elements, expected.elements);
  EXPECT_EQ(actual.samples_of_ranks, expected.samples_of_ranks);
}

Training::Training(const Config& config) : manager_(config, {}), momentum_(parameters_of(manager_)) {
  for (auto& tensor : momentum_) std::ranges::fill(tensor.bytes, std::byte{0});
  if (!manager_.resumed()) return;
  for (auto& saved : copies(manager_.resumed()->tensors))
    *std::ranges::find(momentum_, saved.name, &Tensor::name) = saved;
}

void Training::update() {
  auto parameters = parameters_of(manager_), gradients = gradients_of(manager_);
  for (std::size_t t = 0; t < parameters.size(); ++t)
    for (std::size_t i = 0; i < parameters[t].count(); ++i) {
      auto& momentum = floats(momentum_[t])[i];
      momentum = decay_of_momentum * momentum + floats(gradients[t])[i];
      floats(parameters[t])[i] -= learning_rate * momentum;
    }
  write_parameters(manager_, parameters);
}

void Training::train(std::uint64_t steps) {
  for (auto done = manager_.statistics().steps; done < steps; ++done) {
    const bool first_of_update = done % steps_per_update == 0, last = (done + 1) % steps_per_update == 0;
    expect_ok(manager_, {.accumulate = !first_of_update});
    if (last) update();
  }
}

std::string Training::save() {
  manager_.save_checkpoint({.tensors = views(momentum_)});
  const auto written = manager_.checkpoints_written(patience_s);
  EXPECT_EQ(written.size(), 1u);
  if (written.empty()) return {};
  EXPECT_EQ(written[0].error, "");
  return written[0].path;
}

void Training::kill_runner(int rank) {
  kill(manager_.statistics().runners.at(static_cast<std::size_t>(rank)).pid, SIGKILL);
}

Outcome Training::outcome() const {
  const auto statistics = manager_.statistics();
  Outcome outcome{parameters_of(manager_), gradients_of(manager_), buffers_of(manager_), momentum_,
                  statistics.steps,        statistics.samples,     statistics.elements,  {}};
  for (const auto& runner : statistics.runners) outcome.samples_of_ranks.push_back(runner.samples);
  return outcome;
}

}  // namespace accelmgr::test
