#include "training.hpp"

#include <gtest/gtest.h>
#include <signal.h>

#include "support.hpp"

namespace accelmgr::test {
namespace {

constexpr double patience_s = 30;  // More than anything here takes; reached only by a test that fails.

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

Training::Training(const Config& config)
    : manager_(Manager::start(config)), optimizer_(config.optimizer, manager_.groups(), 100) {
  if (manager_.resumed()) optimizer_.load_state(manager_.resumed()->tensors);
}

void Training::train(std::uint64_t steps) {
  for (auto done = manager_.statistics().steps; done < steps; ++done) {
    const bool first_of_update = done % steps_per_update == 0, last = (done + 1) % steps_per_update == 0;
    expect_ok(manager_, {.accumulate = !first_of_update});
    const auto writing = manager_.writing();
    if (last) optimizer_.step();
  }
}

std::string Training::save() {
  manager_.save_checkpoint({.tensors = optimizer_.state()});
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
  Outcome outcome{copies(manager_.parameters()),
                  copies(manager_.gradients()),
                  copies(manager_.buffers()),
                  copies(optimizer_.state()),
                  statistics.steps,
                  statistics.samples,
                  statistics.elements,
                  {}};
  for (const auto& runner : statistics.runners) outcome.samples_of_ranks.push_back(runner.samples);
  return outcome;
}

}  // namespace accelmgr::test
