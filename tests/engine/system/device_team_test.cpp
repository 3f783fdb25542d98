// Teams of devices in whole systems: runners with a GPU each sum up their gradients over NCCL, beside runners
// on CPUs; what happens to a team when one of its ranks is lost, cannot join, or a step is given up. Driver,
// CUDA and NCCL are fakes; the processes are real.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <thread>
#include <utility>

#include "engine/session/stored_text.hpp"
#include "staged_run.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {
namespace {

using session::RankMask;

constexpr double rounding = 1e-5;
constexpr const char* width = "512";  // Every rank has chunks to reduce.

/// Makes steps of a run. The host writes new parameters before each.
class Trained {
 public:
  explicit Trained(const Config& config) : run(config) {}

  StepResult step() {
    write();
    return expect_ok(run.manager());
  }
  void write() {
    auto parameters = parameters_of(run.manager());
    for (auto& parameter : parameters) {
      auto* values = reinterpret_cast<float*>(parameter.bytes.data());
      for (std::size_t i = 0; i < parameter.count(); ++i) values[i] = 0.9F * values[i] + 0.01F;
    }
    write_parameters(run.manager(), parameters);
  }
  /// The team of the last attempt. Its ranks, and no others, have parts of gradients.
  RankMask team() {
    const auto session = run.manager().session();
    const auto& request = session->control().request;
    const auto attempt = session->word().attempt;
    for (int rank = 0; rank < session->ranks(); ++rank) {
      if ((request.participants >> rank & 1) == 0) continue;
      const bool in_team = (request.device_team.ranks >> rank & 1) != 0;
      const auto is_part = [&](const session::Tag& tag) {
        return tag.load() == attempt && (tag.first() != 0 || tag.end() != session::Tag::to_the_end);
      };
      EXPECT_EQ(std::ranges::any_of(session->tags(rank), is_part), in_team) << "rank " << rank;
    }
    return request.device_team.ranks;
  }
  /// The attempt in which the communicator of the team was made.
  std::uint64_t communicator(int rank = 0) {
    return run.manager().session()->record(rank).device_team.communicator.load();
  }
  void kill(int rank) {
    const auto pidfd = ipc::open_pidfd(pid(rank));
    run.kill_and_wait(pidfd.get());
  }
  pid_t pid(int rank) { return run.manager().statistics().runners.at(static_cast<std::size_t>(rank)).pid; }

  StagedRun run;
};

class DeviceTeam : public testing::Test {
 protected:
  DeviceTeam() {
    unsetenv("CUDA_VISIBLE_DEVICES");
    setenv("FAKE_DRIVER_GPUS", "4", 1);
  }

  static Config on_host(const Stage& stage, int runners) {
    auto config = restarting(stage);
    config.nprocs = runners;
    config.model.options["hidden"] = width;
    return config;
  }
  Config on_gpus(int gpus, int cpus = 0) const {
    auto config = on_host(stage_, gpus + cpus);
    config.model.kind = staged_by_device;
    config.step_timeout = 60;
    config.abort_grace = 30;
    config.runners.device = accelmgr::Device::cuda;
    config.runners.nccl = NcclUse::automatic;
    for (int i = 0; i < gpus; ++i) config.runners.devices.push_back(std::to_string(i));
    for (int i = 0; i < cpus; ++i) config.runners.devices.push_back("cpu");
    return config;
  }
  Config with_fault(const char* fault, int gpus = 2) const {
    auto config = on_gpus(gpus);
    config.model.options["nccl_fault"] = fault;
    config.model.options["nccl_fault_once"] = (folder_ / mark_of(fault)).string();
    return config;
  }
  static std::string mark_of(const char* fault) { return std::string("struck ") + fault; }
  bool has_struck(const char* fault) const { return std::ifstream(folder_ / mark_of(fault)).good(); }

  /// The same steps with as many runners on CPUs.
  StagedOutcome on_cpus(int runners, int steps) {
    if (const auto known = on_cpus_.find({runners, steps}); known != on_cpus_.end()) return known->second;
    Stage stage;
    Trained trained(on_host(stage, runners));
    for (int i = 0; i < steps; ++i) trained.step();
    return on_cpus_[{runners, steps}] = outcome_of(trained.run);
  }
  /// Makes steps, the first of which takes a second try. That has the team, and so many runners were lost and
  /// replaced.
  void expect_second_try(const Config& config, int steps, RankMask team, std::uint64_t lost) {
    SCOPED_TRACE(config.model.options.at("nccl_fault"));
    const auto expected = on_cpus(config.nprocs, steps);
    Trained trained(config);
    EXPECT_EQ(trained.step().tries, 2U);
    EXPECT_EQ(trained.team(), team);
    for (int i = 1; i < steps; ++i) {
      const auto tries = trained.step().tries;
      EXPECT_TRUE(tries == 1 || lost > 0) << tries;
    }
    for (int rank = 1; rank < config.nprocs && team != 0; ++rank)
      EXPECT_EQ(trained.communicator(rank), trained.communicator(0));
    EXPECT_EQ(trained.run.manager().statistics().replacements, lost);
    EXPECT_EQ(trained.run.manager().statistics().losses, lost);
    expect_like(trained, expected);
  }
  static void expect_like(Trained& trained, const StagedOutcome& expected) {
    const auto outcome = outcome_of(trained.run);
    EXPECT_LE(distance(outcome.gradients, expected.gradients), rounding);
    EXPECT_LE(distance(outcome.buffers, expected.buffers), rounding);
    EXPECT_EQ(outcome.elements, expected.elements);
    EXPECT_EQ(outcome.steps, expected.steps);
    EXPECT_EQ(outcome.samples, expected.samples);
  }

  Stage stage_;
  TemporaryFolder folder_;
  std::map<std::pair<int, int>, StagedOutcome> on_cpus_;
};

// Each rank has another part of the master. Steps accumulate.
TEST_F(DeviceTeam, SumsUpWhatRunnersOnCpusWouldAndAddsWhatThoseHave) {
  for (const auto& [gpus, cpus] : {std::pair{2, 0}, {3, 0}, {4, 0}, {2, 2}}) {
    SCOPED_TRACE(fmt::format("{} GPUs, {} CPUs", gpus, cpus));
    const auto expected = on_cpus(gpus + cpus, 3);
    Trained trained(on_gpus(gpus, cpus));
    for (int i = 0; i < 3; ++i) trained.step();
    EXPECT_EQ(trained.team(), session::all_ranks(gpus));
    for (int rank = 0; rank < gpus; ++rank)
      EXPECT_EQ(trained.communicator(rank), 1U) << "one communicator does for all steps";
    expect_like(trained, expected);
  }
}

TEST_F(DeviceTeam, IsNotWhereItIsOffOrGpusAreSharedOrThereIsOne) {
  const auto expected = on_cpus(2, 2);
  auto off = on_gpus(2);
  off.runners.nccl = NcclUse::off;
  auto shared = on_gpus(2);
  shared.runners.devices = {"0", "0"};
  shared.runners.oversubscribe = true;
  for (const auto& config : {off, shared, on_gpus(1, 1)}) {
    Trained trained(config);
    for (int i = 0; i < 2; ++i) trained.step();
    EXPECT_EQ(trained.team(), 0U);
    expect_like(trained, expected);
  }
}

// It has computed nothing that counts.
TEST_F(DeviceTeam, ThatARankCannotJoinIsNoLossAndTheStepGoesThroughTheSession) {
  for (const char* fault : {"0:refuse_id", "0:refuse_join", "1:refuse_join", "1:fail_gather", "0:fail_sum"}) {
    auto config = with_fault(fault);
    config.runners.on_loss = LossPolicy::fail;
    expect_second_try(config, 2, 0, 0);
  }
}

TEST_F(DeviceTeam, ThatARankDoesNotJoinIsGivenUpAtTheDeadline) {
  auto config = with_fault("1:absent");
  config.runners.on_loss = LossPolicy::fail;
  config.step_timeout = 10;  // Half of it is for joining.
  expect_second_try(config, 1, 0, 0);
}

// The watchdog kills it; its replacement makes another team with the others.
TEST_F(DeviceTeam, GetsAReplacementForARankThatHangsInTheJoin) {
  auto config = with_fault("1:hang_join");
  config.runners.hang_timeout = 1;
  expect_second_try(config, 1, 0b11, 1);
  EXPECT_TRUE(has_struck("1:hang_join"));
}

TEST_F(DeviceTeam, GetsAReplacementForARankThatDiesInACallOfNccl) {
  for (const char* fault : {"0:kill_join", "1:kill_join", "0:kill_gather", "1:kill_sum"})
    expect_second_try(with_fault(fault), 2, 0b11, 1);
}

// KILL behind an abort that does nothing: by the supervisor after the grace, or the rank ends itself, because
// NCCL may still write to its memory.
TEST_F(DeviceTeam, GetsAReplacementForARankThatDoesNotComeBackFromTheAbort) {
  const auto expected = on_cpus(2, 3);
  for (const bool itself : {false, true}) {
    SCOPED_TRACE(itself);
    auto config = with_fault("0:hang_abort");
    config.model.options["nccl_fault_once"] += itself ? " itself" : "";
    config.faults = {"rank=1 step=2 phase=backward fault=kill"};
    if (itself)
      config.runners.max_restarts = 1;
    else
      config.abort_grace = 2;
    Trained trained(config);
    for (int i = 0; i < 3; ++i) trained.step();
    EXPECT_TRUE(std::ifstream(config.model.options["nccl_fault_once"]).good());
    EXPECT_EQ(trained.team(), 0b11U);
    EXPECT_EQ(trained.run.manager().statistics().replacements, 2U);
    const auto session = trained.run.manager().session();
    if (itself)
      expect_contains(session::text_of(session->incident(2).what),
                      {"ncclCommAbort has not returned within 5 s", "the process ends"});
    expect_like(trained, expected);
  }
}

// Within a machine a rank that dies breaks the devices of its peers, which may have used its memory. Each of
// those is replaced too, and one loss counts.
TEST_F(DeviceTeam, IsOneLossHoweverManyOfItsRanksARankThatDiesTakesAlong) {
  for (const char* fault : {"1:kill_join", "1:kill_gather", "1:kill_sum"}) {
    auto config = with_fault(fault, 3);
    config.model.options["nccl_fault_spreads"] = "1";
    config.runners.max_restarts = 1;
    expect_second_try(config, 2, 0b111, 3);
  }
}

// Its devices may break when the others leave the team, too, which is in the next attempt here.
TEST_F(DeviceTeam, IsOneLossWhereARankDiesBetweenSteps) {
  const auto expected = on_cpus(3, 2);
  auto config = with_fault("1:none", 3);
  config.model.options["nccl_fault_spreads"] = "1";
  config.runners.max_restarts = 1;
  Trained trained(config);
  trained.step();
  folder_.write(mark_of("1:none"), "");
  trained.kill(1);
  trained.step();
  EXPECT_EQ(trained.team(), 0b111U);
  EXPECT_EQ(trained.run.manager().statistics().replacements, 3U);
  expect_like(trained, expected);
}

TEST_F(DeviceTeam, CountsTheLossOfARankWhoseDeviceBreaksByItself) {
  auto config = with_fault("1:break_sum");
  config.runners.max_restarts = 0;
  Trained trained(config);
  trained.write();
  const auto result = trained.run.manager().step();
  expect_failed(result, StepStatus::runner_lost, {"runners.max_restarts", "runner 1", "ncclReduceScatter"});
}

TEST_F(DeviceTeam, LosesOnlyTheRankThatDiedWhereRunnersAreNotReplaced) {
  auto config = with_fault("1:kill_sum", 3);
  config.model.options["nccl_fault_spreads"] = "1";
  config.runners.on_loss = LossPolicy::shrink;
  Trained trained(config);
  trained.step();
  EXPECT_EQ(trained.team(), 0b101U);
  EXPECT_EQ(trained.run.manager().statistics().replacements, 2U);
}

TEST_F(DeviceTeam, CountsEveryStepOnceUnderKillsAtRandom) {
  constexpr int steps = 12;
  const auto expected = on_cpus(3, steps);
  auto config = on_gpus(3);
  config.runners.restarts_per_window = 0;
  for (const char* phase : {"load_parameters", "data", "forward", "backward", "gradient_capture", "vote",
                            "voted", "reduced", "chunk", "publish", "published", "close"})
    config.faults.push_back(fmt::format(
        "rank=any generation=any phase={} probability=0.02 seed={} fault=kill", phase, config.faults.size()));
  Trained trained(config);
  for (int i = 0; i < steps; ++i) trained.step();
  EXPECT_GT(trained.run.manager().statistics().replacements, 2U);
  expect_like(trained, expected);
}

TEST_F(DeviceTeam, IsMadeAgainAfterAnAttemptThatWasGivenUp) {
  const auto expected = on_cpus(2, 2);
  Trained trained(on_gpus(2));
  trained.step();
  stage_.tell(1, Act::block);
  trained.write();
  EXPECT_EQ(trained.run.manager().step({.interrupted = [&] { return stage_.blocks(1); }}).status,
            StepStatus::timeout);
  // Rank 0 waits for rank 1, which has its parameters. Otherwise both might do their parts before they look.
  while (trained.communicator(0) != 0) std::this_thread::yield();
  stage_.tell(1, Act::compute);
  expect_ok(trained.run.manager());
  EXPECT_EQ(trained.team(), 0b11U);
  EXPECT_EQ(trained.communicator(0), 3U);
  EXPECT_EQ(trained.communicator(1), 3U);
  EXPECT_EQ(trained.run.manager().statistics().losses, 0U);
  expect_like(trained, expected);
}

// A rank whose values are not finite has done its part of the sum, as the others have.
TEST_F(DeviceTeam, SkipsABatchThatIsNotFinite) {
  const auto skipped = [](Stage& stage, Config config) {
    config.on_nonfinite = NonfinitePolicy::skip_batch;
    Trained trained(config);
    trained.step();
    stage.tell_once(1, Act::undefined_gradient);
    EXPECT_EQ(trained.step().skipped, 1U);
    trained.step();
    return outcome_of(trained.run);
  };
  Stage stage;
  const auto expected = skipped(stage, on_host(stage, 2));
  const auto outcome = skipped(stage_, on_gpus(2));
  EXPECT_LE(distance(outcome.gradients, expected.gradients), rounding);
  EXPECT_EQ(outcome.elements, expected.elements);
  EXPECT_EQ(outcome.samples, expected.samples);
}

TEST_F(DeviceTeam, GrowsAndShrinksWithTheRunners) {
  auto config = on_gpus(3);
  config.nprocs = 2;
  config.runners.max_runners = 3;
  Trained trained(config);
  trained.step();
  EXPECT_EQ(trained.team(), 0b011U);
  trained.run.manager().resize(3);
  trained.step();
  EXPECT_EQ(trained.team(), 0b111U);
  trained.run.manager().resize(1);
  trained.step();
  EXPECT_EQ(trained.team(), 0U);
  trained.run.manager().resize(2);
  trained.step();
  EXPECT_EQ(trained.team(), 0b011U);
  EXPECT_EQ(trained.communicator(0), trained.communicator(1));
}

TEST_F(DeviceTeam, IsMadeAnewByTheRunnersOfAnotherManager) {
  const auto expected = on_cpus(2, 2);
  Trained trained(on_gpus(2));
  trained.step();
  trained.run.kill_and_wait(trained.run.processes().manager.get());
  EXPECT_EQ(trained.run.manager().step().status, StepStatus::manager_lost);
  trained.run.manager().recover();
  trained.step();
  EXPECT_EQ(trained.team(), 0b11U);
  EXPECT_GT(trained.communicator(0), 1U);
  expect_like(trained, expected);
}

}  // namespace
}  // namespace accelmgr::test
