// Tests of runners.share measured with whole systems: one runner is really slower. How fast runners are is
// up to the machine, so tests ask which runner computes more, never how much more. Elements and means are
// exact: the gradient of each step says which elements were trained, and with which weight.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "element_weights.hpp"
#include "engine/support/plain_replica.hpp"
#include "staged_run.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

constexpr std::size_t elements = weighed_elements;
constexpr int slow_rank = 0;
constexpr std::uint64_t unit = 300'000;  ///< Of work: takes about a millisecond.

/// How much a rank computes for its n-th micro-batch.
using Work = std::uint64_t (*)(int rank, std::uint64_t n);

std::unique_ptr<replica::Replica> working(int rank, Work work) {
  return std::make_unique<PlainReplica>(
      std::make_unique<ElementWeights>([rank, work, micro_batches = std::uint64_t{0}]() mutable {
        static volatile std::uint64_t worked = 1;
        const auto steps = work(rank, micro_batches++);
        for (std::uint64_t i = 0; i < steps; ++i) worked = worked * 6364136223846793005ULL + 1;
      }));
}
const RegisteredReplica slow_and_fast("slow_and_fast", [](const Config&, replica::Role role) {
  return working(role.rank, [](int rank, std::uint64_t) { return rank == slow_rank ? 4 * unit : unit; });
});
/// The ranks are slow in turn.
const RegisteredReplica alternating("alternating", [](const Config&, replica::Role role) {
  return working(role.rank, [](int rank, std::uint64_t n) {
    return n / 64 % 2 == static_cast<std::uint64_t>(rank % 2) ? 4 * unit : unit;
  });
});
const RegisteredData in_order("in_order", elements_in_order);

Config slow_and_fast_config(int runners = 2) {
  Config config;
  config.nprocs = runners;
  config.batch_size_per_device = 2;
  config.grad_accumulation_steps = 4;
  config.prefetch = 3;
  config.start_timeout = 60;
  config.step_timeout = 60;
  config.runners.threads = 1;
  config.runners.share = Share::measured;
  config.runners.restart_backoff = 0;
  config.model.kind = "slow_and_fast";
  config.data.kind = "in_order";
  return config;
}

/// Makes steps and checks each: its elements are the next ones, each once and with its weight.
class CheckedRun : public StagedRun {
 public:
  using StagedRun::StagedRun;

  /// Steps may overwrite or accumulate. Returns how many samples each rank of the team computed.
  std::vector<std::uint64_t> step(bool accumulate = false) {
    const auto before = manager().statistics();
    expected_.resize(elements);
    if (!accumulate) std::ranges::fill(expected_, 0.0);
    auto result = manager().step({.accumulate = accumulate});
    while (result.status == StepStatus::manager_lost) {
      recover();
      if (result.counted) break;
      result = manager().step({.accumulate = accumulate});
    }
    EXPECT_TRUE(result.counted) << result.error;
    const auto after = manager().statistics();
    EXPECT_EQ(after.elements - before.elements, result.samples);
    double loss = 0;
    for (auto i = before.elements; i < after.elements; ++i) {
      expected_[i % elements] += 1 / double(result.samples);
      loss += double(i % elements) / double(result.samples);
    }
    EXPECT_NEAR(result.loss, loss, 1e-9);
    const auto weights = gradients();
    for (std::size_t i = 0; i < elements; ++i)
      EXPECT_NEAR(weights.at(0)[i], expected_[i], 1e-5)
          << "element " << i << " of a step of [" << before.elements << ", " << after.elements << ")";
    std::vector<std::uint64_t> samples;
    for (std::size_t i = 0; i < after.runners.size(); ++i)
      for (const auto& was : before.runners)
        if (was.rank == after.runners[i].rank) samples.push_back(after.runners[i].samples - was.samples);
    return samples;
  }
  /// Makes steps until the slow rank computes fewer micro-batches than any other. Fails the test after
  /// `most`: on a loaded machine the slow rank may be the fastest for a while.
  void step_until_uneven(int most = 1000) {
    for (int i = 0; i < most; ++i) {
      const auto samples = step();
      if (*std::min_element(samples.begin() + 1, samples.end()) > samples[0]) return;
    }
    ADD_FAILURE() << "after " << most << " steps the slow rank still computes as much as others";
  }

  int recoveries() const { return recoveries_; }

 private:
  void recover() {
    for (const auto deadline = soon(); !deadline.passed();) {
      try {
        manager().recover();
        ++recoveries_;
        return;
      } catch (const Error&) {
        continue;  // The new manager was killed too.
      }
    }
    ADD_FAILURE() << "no manager takes over";
  }

  std::vector<double> expected_;
  int recoveries_ = 0;
};

TEST(MeasuredShare, TheSlowRunnerComputesLessAndEveryElementIsTrainedOnceInEachPass) {
  CheckedRun run(slow_and_fast_config());
  const auto first = run.step();
  EXPECT_EQ(first, (std::vector<std::uint64_t>{8, 8})) << "nothing is measured yet";
  run.step_until_uneven();
  for (int i = 0; i < 6; ++i) {
    const auto samples = run.step(i > 0);
    EXPECT_EQ(samples[0] + samples[1], 16u) << "a step has as many micro-batches as with even shares";
  }
}

TEST(MeasuredShare, SharesThatChangeAgainAndAgainUnderKillsLoseAndDoubleNothing) {
  auto config = slow_and_fast_config();
  config.model.kind = "alternating";
  config.runners.restarts_per_window = 0;
  config.runners.max_restarts = 1'000'000;
  int seed = 0;
  for (const auto* phase : {"load_parameters", "data", "forward", "backward", "gradient_capture", "vote",
                            "voted", "reduced", "publish", "published", "close"})
    config.faults.push_back("rank=any generation=any phase=" + std::string(phase) +
                            " probability=0.004 fault=kill seed=" + std::to_string(++seed));
  config.faults.push_back("rank=manager generation=any phase=data probability=0.002 fault=kill seed=99");
  CheckedRun run(config);
  std::set<std::vector<std::uint64_t>> divisions;
  for (int i = 0; i < 200; ++i) divisions.insert(run.step());
  EXPECT_GT(divisions.size(), 1u);
  EXPECT_GT(run.manager().statistics().replacements, 0u);
  EXPECT_GT(run.recoveries(), 0);
}

TEST(MeasuredShare, ATeamThatGrowsBeginsEvenAndIsMeasuredAnew) {
  auto config = slow_and_fast_config();
  config.runners.max_runners = 3;
  CheckedRun run(config);
  run.step_until_uneven();
  run.manager().resize(3);
  run.step();
  EXPECT_EQ(run.step(), (std::vector<std::uint64_t>{8, 8, 8}));
  run.step_until_uneven();
  run.manager().resize(1);
  EXPECT_EQ(run.step(), (std::vector<std::uint64_t>{8}));
}

TEST(MeasuredShare, ALastShortStepIsAMeanBySamples) {
  auto config = slow_and_fast_config();
  config.loss_scaling = LossScaling::samples;
  config.data.drop_last = false;
  config.data.epochs = 40;  // 106 steps of 24 elements and one of 16.
  config.batch_size_per_device = 3;
  CheckedRun run(config);
  const auto all = std::uint64_t{40} * elements;
  run.step_until_uneven(100);
  while (run.manager().statistics().elements < all) run.step();
  EXPECT_EQ(run.manager().statistics().elements, all);
  EXPECT_EQ(run.manager().step().status, StepStatus::data_end);
}

}  // namespace
}  // namespace accelmgr::test
