// Checks that inner steps, whose update the session makes, train as Optimizer does in the host, and that a
// killed process leaves a whole step.
#include <fmt/format.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "accelmgr/optimizer.hpp"
#include "support.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {
namespace {

constexpr std::int64_t total_updates = 12;

struct Case {
  std::string name;
  OptimizerConfig optimizer{};
  std::string model = "gpt";
  int nprocs = 2;
  std::function<void(Config&)> change = [](Config&) {};
  double tolerance = 1e-6;  ///< Relative to the norm of each tensor.
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

Config config_of(const Case& c) {
  auto config = small_config(c.model);
  config.nprocs = c.nprocs;
  config.optimizer = c.optimizer;
  c.change(config);
  return config;
}

StepOptions inner(const Config& config) {
  return {.optimizer = &config.optimizer, .total_updates = total_updates};
}

Trained train(Manager& manager, const Config& config, int steps) {
  std::vector<double> losses;
  for (int i = 0; i < steps; ++i) losses.push_back(expect_ok(manager, inner(config)).loss);
  return Trained(manager, losses);
}

class InnerSteps : public testing::TestWithParam<Case> {};

/// Copies of the groups, for an optimizer of this process.
std::vector<FlatGroup> copies_of(const std::vector<FlatGroup>& groups) {
  auto own = groups;
  for (auto& group : own) {
    group.parameters = group.parameters.detach().clone();
    group.gradients = group.gradients.clone();
  }
  return own;
}

// Each update begins with the same bits, so that rounding does not add up.
TEST_P(InnerSteps, MakeTheUpdatesOfTheHostsOptimizer) {
  const auto config = config_of(GetParam());
  auto manager = Manager::start(config);
  const auto groups = copies_of(manager.groups());
  Optimizer optimizer(config.optimizer, groups, total_updates);
  const auto per_update = config.optimizer.steps_per_update;
  const auto in_session = [&](std::size_t i) { return manager.groups()[i]; };
  for (int step = 1; step <= 12; ++step) {
    const auto result = expect_ok(manager, inner(config));
    EXPECT_EQ(manager.updates(), step / per_update);
    if (step % per_update != 0) continue;
    std::vector<at::Tensor> before, after, expected;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      before.push_back(groups[i].parameters.clone());
      after.push_back(in_session(i).parameters.detach().clone());
      groups[i].gradients.copy_(in_session(i).gradients);
    }
    const double norm = optimizer.step();
    if (config.optimizer.clip_norm > 0)
      EXPECT_NEAR(result.grad_norm, norm, 1e-6 * norm);
    else
      EXPECT_EQ(result.grad_norm, 0);
    for (const auto& group : groups) expected.push_back(group.parameters);
    EXPECT_LE(distance(after, expected), GetParam().tolerance);
    EXPECT_FALSE(same_bits(after, before));
    const auto state = manager.optimizer_state(), own = optimizer.state();
    ASSERT_EQ(state.size(), own.size());
    for (std::size_t i = 0; i < own.size(); ++i) EXPECT_EQ(state[i].name, own[i].name);
    EXPECT_LE(distance(copies(state), copies(own)), GetParam().tolerance);
    optimizer.load_state(state);
    for (std::size_t i = 0; i < groups.size(); ++i) groups[i].parameters.copy_(after[i]);
  }
}

TEST_P(InnerSteps, HaveTheSameBitsAgain) {
  const auto config = config_of(GetParam());
  const auto run = [&] {
    auto manager = Manager::start(config);
    return train(manager, config, 4);
  };
  EXPECT_TRUE(run() == run());
}

INSTANTIATE_TEST_SUITE_P(
    Optimizers, InnerSteps,
    testing::Values(Case{.name = "AdamwClipped",
                         .optimizer = {.weight_decay = 0.1,
                                       .clip_norm = 0.5,
                                       .warmup_updates = 4,
                                       .schedule = Schedule::cosine}},
                    Case{.name = "AdamOfThree",
                         .optimizer = {.kind = OptimizerKind::adam, .weight_decay = 0.1},
                         .nprocs = 3},
                    Case{.name = "AdamwOfOneUnprotected",
                         .optimizer = {.clip_norm = 0.1},
                         .nprocs = 1,
                         .change = [](Config& config) { config.runners.protect_parameters = false; }},
                    Case{.name = "AdamwAfterThreeSteps",
                         .optimizer = {.clip_norm = 0.5, .steps_per_update = 3}},
                    Case{.name = "Sgd",
                         .optimizer = {.kind = OptimizerKind::sgd, .learning_rate = 0.1},
                         .model = "convnet"},
                    Case{.name = "SgdNesterov",
                         .optimizer = {.kind = OptimizerKind::sgd,
                                       .learning_rate = 0.05,
                                       .momentum = 0.9,
                                       .nesterov = true,
                                       .weight_decay = 0.01},
                         .model = "mlp",
                         .nprocs = 3},
                    Case{.name = "LargeMlp",  // Each slice has several parts.
                         .optimizer = {.weight_decay = 0.1, .clip_norm = 0.5},
                         .model = "mlp",
                         .change = [](Config& config) { config.model.mlp.hidden_size = 2500; }}),
    [](const auto& info) { return info.param.name; });

const Case adamw{.name = "Adamw", .optimizer = {.weight_decay = 0.1, .clip_norm = 0.5}};

class KilledInAnUpdate : public testing::TestWithParam<std::string> {};

// Rank 1 is killed in the third step. Nothing is lost or made twice.
TEST_P(KilledInAnUpdate, LeavesTheBitsOfAnUndisturbedRun) {
  auto config = config_of(adamw);
  auto undisturbed = Manager::start(config);
  const auto expected = train(undisturbed, config, 6);
  config.faults = {fmt::format("rank=1 step=3 generation=1 fault=kill {}", GetParam())};
  auto manager = Manager::start(config);
  EXPECT_TRUE(train(manager, config, 6) == expected);
  EXPECT_EQ(manager.statistics().replacements, 1u);
}

INSTANTIATE_TEST_SUITE_P(Places, KilledInAnUpdate,
                         testing::Values("phase=reduced", "phase=published", "phase=update_saved",
                                         "phase=update_in_flight occurrence=3", "phase=updated occurrence=2",
                                         "phase=updated occurrence=5", "phase=close"));

TEST(InnerStepsOfAManager, GoOnWhenItIsLostInAnUpdate) {
  auto config = config_of(adamw);
  auto undisturbed = Manager::start(config);
  const auto expected = train(undisturbed, config, 6);
  config.faults = {"rank=1 step=3 phase=update_in_flight occurrence=2 fault=hang"};
  config.runners.reduction_timeout = 1000;
  auto manager = Manager::start(config);
  std::vector<double> losses;
  for (int i = 0; i < 2; ++i) losses.push_back(expect_ok(manager, inner(config)).loss);
  // The step waits for rank 1, which stands in its update.
  std::thread killer([&manager] {
    const auto deadline = soon();
    const auto wait_until = [&](auto holds) {
      while (!holds(manager.statistics().runners.at(1)) && !deadline.passed()) std::this_thread::yield();
    };
    wait_until([](const RunnerStatistics& seen) { return seen.attempt == 3; });  // Not the update before.
    wait_until([](const RunnerStatistics& seen) { return seen.phase == "update"; });
    kill(manager.statistics().manager_pid, SIGKILL);
  });
  const auto lost = manager.step(inner(config));
  killer.join();
  EXPECT_EQ(lost.status, StepStatus::manager_lost) << lost.error;
  EXPECT_TRUE(lost.counted);
  losses.push_back(lost.loss);
  manager.recover();
  const auto rest = train(manager, config, 3);
  losses.insert(losses.end(), rest.losses.begin(), rest.losses.end());
  EXPECT_TRUE(Trained(manager, losses) == expected);
}

class InnerStepsInACheckpoint : public testing::Test {
 protected:
  InnerStepsInACheckpoint() {
    config_.checkpoint.directory = folder_.path();
    config_.optimizer.steps_per_update = 2;
  }
  static void save(Manager& manager, const std::vector<NamedTensor>& state) {
    manager.save_checkpoint({.tensors = state});
    EXPECT_EQ(manager.checkpoints_written(30).at(0).error, "");
  }
  Config resumed() const {
    auto config = config_;
    config.checkpoint.resume = "latest";
    return config;
  }

  TemporaryFolder folder_;
  Config config_ = config_of(adamw);
};

// The checkpoint is written in the middle of an update's steps.
TEST_F(InnerStepsInACheckpoint, EndAsOneRun) {
  auto whole = Manager::start(config_);
  const auto expected = train(whole, config_, 10);
  {
    auto manager = Manager::start(config_);
    train(manager, config_, 5);
    save(manager, manager.optimizer_state());
  }
  auto manager = Manager::start(resumed());
  manager.load_optimizer_state(config_.optimizer, manager.resumed()->tensors);
  EXPECT_EQ(manager.updates(), 2);
  train(manager, config_, 5);
  EXPECT_TRUE(same_bits(Trained(manager).parameters, expected.parameters));
  EXPECT_TRUE(same_bits(Trained(manager).state, expected.state));
}

TEST_F(InnerStepsInACheckpoint, GoOnFromStepsOfTheHostAndBack) {
  {
    auto manager = Manager::start(config_);
    Optimizer optimizer(config_.optimizer, manager.groups(), total_updates);
    for (int i = 0; i < 2; ++i) expect_ok(manager);
    const auto writing = manager.writing();
    optimizer.step();
    save(manager, optimizer.state());
  }
  {
    auto manager = Manager::start(resumed());
    manager.load_optimizer_state(config_.optimizer, manager.resumed()->tensors);
    train(manager, config_, 4);
    EXPECT_EQ(manager.updates(), 3);
    save(manager, manager.optimizer_state());
  }
  auto manager = Manager::start(resumed());
  Optimizer optimizer(config_.optimizer, manager.groups(), total_updates);
  optimizer.load_state(manager.resumed()->tensors);
  EXPECT_EQ(optimizer.updates(), 3);
}

TEST(InnerStepsOfAnotherKind, BeginWithAStateOfZeros) {
  auto config = config_of(adamw);
  auto manager = Manager::start(config);
  train(manager, config, 2);
  config.optimizer = {.kind = OptimizerKind::sgd, .momentum = 0.9};
  const auto state = train(manager, config, 1).state;
  EXPECT_EQ(manager.updates(), 1);
  // After one update the momentum is the gradient.
  EXPECT_TRUE(same_bits({state.front()}, {manager.groups().front().gradients}));
}

TEST(InnerStepsBesideOthers, LeaveGradientsThatTheNextStepOverwrites) {
  const auto config = config_of(adamw);
  auto manager = Manager::start(config);
  train(manager, config, 1);
  const auto parameters = copies(manager.parameters());
  expect_ok(manager);
  EXPECT_TRUE(same_bits(copies(manager.parameters()), parameters));
  auto other = Manager::start(config);
  expect_ok(other, {.accumulate = false});
  other.update_model_parameters(parameters);
  expect_ok(other, {.accumulate = false});
  EXPECT_TRUE(same_bits(copies(manager.gradients()), copies(other.gradients())));
}

TEST(InnerStepsRefuse, WhatAnOptimizerRefuses) {
  auto config = config_of(adamw);
  auto manager = Manager::start(config);
  config.optimizer = {.kind = OptimizerKind::sgd, .nesterov = true};
  EXPECT_THROW(manager.step(inner(config)), ConfigError);
  EXPECT_THROW(manager.load_optimizer_state(adamw.optimizer, {}), ModelError);
  EXPECT_EQ(manager.statistics().steps, 0u);
}

// ---- Steps that a thread makes while the host does something else ----

const Case pending_case{.name = "pending",
                        .optimizer = {.clip_norm = 0.5, .warmup_updates = 3, .schedule = Schedule::cosine}};

TEST(PendingSteps, HaveTheSameBits) {
  const auto config = config_of(pending_case);
  auto first = Manager::start(config), second = Manager::start(config);
  const auto expected = train(first, config, 9);
  EXPECT_FALSE(second.pending_steps());
  auto losses = train(second, config, 2).losses;
  auto pending = second.begin_steps(6, inner(config));
  for (const auto& result : pending.result()) losses.push_back(result.loss);
  EXPECT_TRUE(pending.done());
  losses.push_back(expect_ok(second, inner(config)).loss);
  EXPECT_TRUE(Trained(second, losses) == expected);
}

TEST(PendingSteps, KeepOthersOutUntilTheyAreCancelled) {
  const auto config = config_of(pending_case);
  auto manager = Manager::start(config);
  auto pending = manager.begin_steps(100'000, inner(config));
  EXPECT_THROW(manager.step(), UsageError);
  EXPECT_THROW(manager.zero_grad(), UsageError);
  EXPECT_THROW(manager.begin_steps(1, inner(config)), UsageError);
  if (fork() == 0) {
    { auto closed = std::move(manager); }  // Its thread is not here.
    _exit(0);
  }
  int status = -1;
  EXPECT_GT(wait(&status), 0);
  EXPECT_EQ(status, 0);
  pending.cancel();
  EXPECT_TRUE(pending.wait(0));
  EXPECT_EQ(pending.result().size(), manager.statistics().steps);
  expect_ok(manager, inner(config));
  manager.begin_steps(100'000, inner(config));
  manager.stop();
  EXPECT_TRUE(manager.pending_steps()->done());
}

TEST(PendingSteps, EndWithTheDataAndWithWhatStepThrows) {
  auto config = config_of(pending_case);
  config.data.elements = 10 * 2 * config.batch_size_per_device;
  config.data.epochs = 1;
  auto manager = Manager::start(config);
  const auto made = manager.begin_steps(100, inner(config)).result();
  ASSERT_EQ(made.size(), 11u);
  EXPECT_EQ(made.back().status, StepStatus::data_end);
  auto refused = config;
  refused.optimizer.steps_per_update = 0;
  EXPECT_THROW(manager.begin_steps(1, inner(refused)).result(), ConfigError);
  EXPECT_THROW(manager.begin_steps(0, inner(config)), UsageError);
  EXPECT_THROW(manager.begin_steps(1, {}), UsageError);
}

}  // namespace
}  // namespace accelmgr::test
