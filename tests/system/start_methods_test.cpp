// However the manager process comes to be, what it does is the same.
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include "config/start_method.hpp"
#include "ipc/process.hpp"
#include "launch/forkserver.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

class StartMethods : public testing::TestWithParam<StartMethod> {
 protected:
  ~StartMethods() override { launch::end_forkserver(); }
};

void kill_and_wait(pid_t pid) {
  const auto pidfd = ipc::open_pidfd(pid);
  ipc::send_signal(pidfd.get(), SIGKILL);
  ASSERT_TRUE(ipc::wait_ended(pidfd.get(), base::Deadline::in_seconds(10)));
}

void kill_manager(const Manager& manager) { kill_and_wait(manager.statistics().manager_pid); }

TEST_P(StartMethods, TrainAlikeAndTellHowTheManagerEnded) {
  const auto config = small_config("mlp");
  auto manager = Manager::start(config, {.method = GetParam()});
  Reference reference(config);
  const auto expect_as_reference = [&] {
    expect_ok(manager, {.accumulate = false});
    const auto expected = reference.step(copies(manager.parameters()));
    EXPECT_LE(distance(copies(manager.gradients()), expected.gradients), 1e-6);
  };
  expect_as_reference();
  const int first = manager.statistics().manager_pid;
  kill_manager(manager);
  const auto result = manager.step();
  EXPECT_EQ(result.status, StepStatus::manager_lost);
  EXPECT_THAT(result.error, testing::HasSubstr("killed by signal 9 (KILL)"));
  manager.recover();
  EXPECT_NE(manager.statistics().manager_pid, first);
  expect_as_reference();
}

TEST_P(StartMethods, HaveTheInitialParametersBeforeThereAreRunners) {
  std::vector<const void*> parameters, gradients;
  std::vector<at::Tensor> values;
  const auto prepared = [&](const std::vector<NamedTensor>& p, const std::vector<NamedTensor>& g) {
    parameters = addresses(p);
    gradients = addresses(g);
    values = copies(p);
  };
  const auto manager = Manager::start(small_config("mlp"), {.method = GetParam(), .prepared = prepared});
  EXPECT_EQ(addresses(manager.parameters()), parameters);
  EXPECT_EQ(addresses(manager.gradients()), gradients);
  EXPECT_TRUE(same_bits(copies(manager.parameters()), values));
}

TEST_P(StartMethods, GiveBackAllWhenTheHostRefusesWhatWasPrepared) {
  const auto refuse = [](const auto&, const auto&) { throw UsageError("not like this"); };
  const auto before = ipc::children();
  const auto start = [&] { Manager::start(small_config("mlp"), {.method = GetParam(), .prepared = refuse}); };
  EXPECT_EQ(message_of<UsageError>(start), "not like this");
  launch::end_forkserver();
  EXPECT_EQ(ipc::children(), before);
}

INSTANTIATE_TEST_SUITE_P(All, StartMethods,
                         testing::Values(StartMethod::spawn, StartMethod::fork, StartMethod::forkserver),
                         [](const auto& method) { return config::name_of(method.param); });

TEST(Forkserver, IsReplacedWhenItHasDiedAndItsManagersLiveOn) {
  const auto before = ipc::children();
  auto manager = Manager::start(small_config("mlp"), {.method = StartMethod::forkserver});
  const auto servers = ipc::children();
  ASSERT_EQ(servers.size(), before.size() + 1) << "the manager is its child, not ours";
  kill_and_wait(servers.back());
  expect_ok(manager);
  auto other = Manager::start(small_config("mlp"), {.method = StartMethod::forkserver});
  expect_ok(other);
  kill_manager(manager);
  EXPECT_THAT(manager.step().error, testing::HasSubstr("how it ended is not known"));
  expect_ok(other);
  other.stop();
  launch::end_forkserver();
  EXPECT_EQ(ipc::children(), before);
}

TEST(Forkserver, ThatIsStoppedHoldsNobodyUp) {
  const auto before = ipc::children();
  auto manager = Manager::start(small_config("mlp"), {.method = StartMethod::forkserver});
  const auto server = ipc::open_pidfd(ipc::children().back());
  ipc::send_signal(server.get(), SIGSTOP);
  expect_ok(manager);
  kill_manager(manager);
  EXPECT_THAT(manager.step().error, testing::HasSubstr("how it ended is not known"));
  manager.stop();
  launch::end_forkserver();
  EXPECT_EQ(ipc::children(), before);
}

}  // namespace
}  // namespace accelmgr::test
