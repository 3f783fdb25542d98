// Inner steps on a service: a host that dies leaves a whole step, optimizer included, and the next one goes
// on.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utility>

#include "accelmgr/observer.hpp"
#include "base/clock.hpp"
#include "service_process.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

constexpr std::int64_t total_updates = 40;  ///< Of a learning rate that differs from step to step.
const OptimizerConfig adamw{
    .weight_decay = 0.1, .clip_norm = 0.5, .warmup_updates = 3, .schedule = Schedule::cosine};
const StepOptions inner{.optimizer = &adamw, .total_updates = total_updates};

Trained train(Manager& manager, std::uint64_t steps) {
  while (manager.statistics().steps < steps) expect_ok(manager, inner);
  return Trained(manager);
}

Trained undisturbed(std::uint64_t steps) {
  const ServiceProcess service;
  auto manager = Manager::attach(service.socket());
  return train(manager, steps);
}

/// A host in a process of its own, which is killed as soon as `until` is true.
void die_as_host(const ServiceProcess& service, const std::function<bool(const Statistics&)>& until) {
  const auto observer = Observer::attach(service.socket());
  const auto host = fork();
  if (host == 0) {
    auto manager = Manager::attach(service.socket());
    for (;;) manager.step(inner);
  }
  const auto deadline = soon();
  while (!until(observer.statistics()) && !deadline.passed()) sched_yield();
  kill(host, SIGKILL);
  int status = 0;
  ASSERT_EQ(waitpid(host, &status, 0), host);
  ASSERT_TRUE(WIFSIGNALED(status));
}

TEST(InnerStepsOnAService, GoOnWithTheNextHost) {
  const auto expected = undisturbed(6);
  const ServiceProcess service;
  {
    auto manager = Manager::attach(service.socket());
    train(manager, 4);
  }
  auto manager = Manager::attach(service.socket());
  EXPECT_EQ(manager.left_gradients(), LeftGradients::applied);
  EXPECT_EQ(manager.unfinished(), "");
  EXPECT_EQ(manager.updates(), 4);
  EXPECT_TRUE(train(manager, 6) == expected);
}

TEST(InnerStepsOnAService, CountInFullWhenTheirHostIsKilled) {
  const ServiceProcess service;
  die_as_host(service, [](const Statistics& seen) { return seen.steps >= 5; });
  auto manager = Manager::attach(service.socket(), {.timeout_s = 60});
  const auto steps = manager.statistics().steps;
  EXPECT_EQ(manager.unfinished(), "");
  EXPECT_EQ(manager.updates(), static_cast<std::int64_t>(steps));
  EXPECT_TRUE(Trained(manager) == undisturbed(steps));
  EXPECT_TRUE(train(manager, steps + 3) == undisturbed(steps + 3));
}

// Rank 1 stands in its update when the host is killed, and is killed by the watchdog.
TEST(InnerStepsOnAService, CountInFullWhenHostAndRunnerAreKilledInAnUpdate) {
  const ServiceProcess service("rank=1 step=3 generation=1 phase=update_in_flight fault=hang");
  die_as_host(service, [third = false](const Statistics& seen) mutable {
    const auto& runner = seen.runners.at(1);
    return std::exchange(third, runner.attempt == 3) && runner.phase == "update";
  });
  auto manager = Manager::attach(service.socket(), {.timeout_s = 60});
  EXPECT_EQ(manager.updates(), 3);
  EXPECT_TRUE(train(manager, 6) == undisturbed(6));
}

// ---- Steps that the service makes while its host does something else ----

TEST(PendingStepsOfAService, HaveTheSameBits) {
  const ServiceProcess service;
  auto manager = Manager::attach(service.socket());
  EXPECT_FALSE(manager.pending_steps());
  auto pending = manager.begin_steps(5, inner);
  const auto made = pending.result();
  ASSERT_EQ(made.size(), 5u);
  EXPECT_TRUE(pending.done());
  for (const auto& result : made) {
    EXPECT_EQ(result.status, StepStatus::ok);
    EXPECT_TRUE(result.counted);
    EXPECT_GT(result.grad_norm, 0);
  }
  EXPECT_EQ(manager.updates(), 5);
  expect_ok(manager, inner);
  EXPECT_EQ(manager.begin_steps(2, inner).result().size(), 2u);
  EXPECT_TRUE(Trained(manager) == undisturbed(8));
}

TEST(PendingStepsOfAService, GoOnWithoutTheirHost) {
  const ServiceProcess service;
  {
    auto manager = Manager::attach(service.socket());
    manager.begin_steps(20, inner);
  }
  {
    auto manager = Manager::attach(service.socket(), {.timeout_s = 60});
    const auto found = manager.pending_steps();
    ASSERT_TRUE(found);
    EXPECT_EQ(found->result().size(), 20u);
    EXPECT_TRUE(Trained(manager) == undisturbed(20));
    EXPECT_TRUE(train(manager, 22) == undisturbed(22));
  }
  EXPECT_FALSE(Manager::attach(service.socket(), {.timeout_s = 60}).pending_steps())
      << "there are later steps";
}

TEST(PendingStepsOfAService, GoOnWithTheRunnerThatReplacesOneAndWithoutTheirHost) {
  const ServiceProcess service("rank=1 step=3 generation=1 phase=update_in_flight fault=kill");
  const auto host = fork();
  if (host == 0) {
    auto manager = Manager::attach(service.socket());
    manager.begin_steps(10, inner);
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(host, &status, 0), host);
  auto manager = Manager::attach(service.socket(), {.timeout_s = 60});
  const auto found = manager.pending_steps();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->result().size(), 10u);
  EXPECT_TRUE(train(manager, 12) == undisturbed(12));
}

TEST(PendingStepsOfAService, AreEndedByCancel) {
  const ServiceProcess service;
  auto manager = Manager::attach(service.socket());
  auto pending = manager.begin_steps(100'000, inner);
  EXPECT_THROW(manager.step(inner), UsageError);
  EXPECT_THROW(manager.zero_grad(), UsageError);
  EXPECT_THROW(manager.begin_steps(1, inner), UsageError);
  EXPECT_FALSE(pending.wait(0));
  pending.cancel();
  EXPECT_TRUE(pending.wait(0));
  EXPECT_EQ(pending.results().size(), manager.statistics().steps);
  expect_ok(manager, inner);
}

TEST(InnerStepsOnAService, AreSeenWholeByObservers) {
  const ServiceProcess service;
  const auto observer = Observer::attach(service.socket());
  std::vector<at::Tensor> seen;
  std::uint64_t step = 0;
  die_as_host(service, [&](const Statistics& statistics) {
    if (statistics.steps < 2) return false;
    try {
      const auto copy = observer.parameters(60);
      step = copy.step;
      seen = copies(copy.tensors);
      return true;
    } catch (const SessionError&) {
      return false;
    }
  });
  EXPECT_TRUE(same_bits(seen, undisturbed(step).parameters));
}

}  // namespace
}  // namespace accelmgr::test
