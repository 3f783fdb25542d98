#include "engine/manager/restart_policy.hpp"

#include <gtest/gtest.h>

namespace accelmgr::manager {
namespace {

using Kind = Decision::Kind;

constexpr std::int64_t second_ns = 1'000'000'000;

RunnersConfig restarting() {
  RunnersConfig config;
  config.on_loss = LossPolicy::restart;
  config.max_restarts = 10;
  config.restarts_per_window = 3;
  config.restart_window = 60;
  config.restart_backoff = 0.5;
  return config;
}

TEST(RestartPolicy, TheWholeRunHasALimitToo) {
  auto config = restarting();
  config.restarts_per_window = 0;  // No limit within a window.
  RestartPolicy policy(config);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(policy.runner_lost(i * 100 * second_ns, 1, "").kind, Kind::replace);
  const auto decision = policy.runner_lost(2000 * second_ns, 1, "");
  EXPECT_EQ(decision.kind, Kind::give_up);
  EXPECT_NE(decision.why.find("runners.max_restarts"), std::string::npos) << decision.why;
}

TEST(RestartPolicy, WhoIsLostWithAnotherIsReplacedAndDoesNotCount) {
  auto config = restarting();
  config.max_restarts = 1;
  for (const auto policy : {LossPolicy::restart, LossPolicy::shrink}) {
    config.on_loss = policy;
    RestartPolicy restarts(config);
    for (int i = 0; i < 7; ++i) {
      const auto decision = restarts.lost_with_another();
      EXPECT_EQ(decision.kind, Kind::replace);
      EXPECT_EQ(decision.delay_ns, 0);
    }
    EXPECT_NE(restarts.runner_lost(0, 1, "").kind, Kind::give_up);
  }
  config.on_loss = LossPolicy::fail;
  EXPECT_EQ(RestartPolicy(config).lost_with_another().kind, Kind::give_up);
}

TEST(RestartPolicy, AForkServerIsOneLossHoweverManyRunnersItTookAlong) {
  auto config = restarting();
  config.on_loss = LossPolicy::shrink;
  RestartPolicy policy(config);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(policy.fork_server_lost(i).kind, Kind::replace);
  EXPECT_EQ(policy.fork_server_lost(3).kind, Kind::give_up);
}

TEST(RestartPolicy, NoBackoffIsNone) {
  auto config = restarting();
  config.restart_backoff = 0;
  RestartPolicy policy(config);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(policy.runner_lost(i, 1, "").delay_ns, 0);
}

}  // namespace
}  // namespace accelmgr::manager
