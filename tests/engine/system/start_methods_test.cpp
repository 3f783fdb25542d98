// Checks that the manager behaves the same with every start method.
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/config/start_method.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/zygote.hpp"
#include "perceptrons.hpp"
#include "reference.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

class StartMethods : public testing::TestWithParam<StartMethod> {
 protected:
  ~StartMethods() override { ipc::end_zygote(); }
};

void kill_manager(const client::Handle& manager) { kill_and_wait(manager.statistics().manager_pid); }

TEST_P(StartMethods, TrainAlikeAndTellHowTheManagerEnded) {
  const auto config = perceptron_config();
  client::Handle manager(config, {.method = GetParam()});
  Reference reference(config);
  const auto expect_as_reference = [&] {
    expect_ok(manager, {.accumulate = false});
    const auto expected = reference.step(parameters_of(manager));
    EXPECT_LE(distance(gradients_of(manager), expected.gradients), 1e-6);
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
  std::shared_ptr<const session::Session> session;
  std::vector<std::byte> values;
  const auto prepared = [&](std::shared_ptr<const session::Session> s, const session::HostView&,
                            const session::Manifest& manifest, bool) {
    session = s;
    EXPECT_TRUE(manifest.tensors.at(0).name == "encoder.weight");
    values.assign(s->parameters(), s->parameters() + s->header().bytes.parameters);
  };
  const client::Handle manager(perceptron_config(), {.method = GetParam(), .prepared = prepared});
  EXPECT_EQ(manager.session(), session);
  EXPECT_EQ(std::memcmp(session->parameters(), values.data(), values.size()), 0);
  EXPECT_TRUE(std::ranges::any_of(values, [](std::byte byte) { return byte != std::byte{0}; }));
}

TEST_P(StartMethods, GiveBackAllWhenTheHostRefusesWhatWasPrepared) {
  const auto refuse = [](const auto&, const auto&, const auto&, bool) { throw UsageError("not like this"); };
  const auto before = ipc::children();
  const auto start = [&] { client::Handle(perceptron_config(), {.method = GetParam(), .prepared = refuse}); };
  EXPECT_EQ(message_of<UsageError>(start), "not like this");
  ipc::end_zygote();
  EXPECT_EQ(ipc::children(), before);
}

INSTANTIATE_TEST_SUITE_P(All, StartMethods,
                         testing::Values(StartMethod::spawn, StartMethod::fork, StartMethod::forkserver),
                         [](const auto& method) { return config::name_of(method.param); });

TEST(Zygote, IsReplacedWhenItHasDiedAndItsManagersLiveOn) {
  const auto before = ipc::children();
  client::Handle manager(perceptron_config(), {.method = StartMethod::forkserver});
  const auto servers = ipc::children();
  ASSERT_EQ(servers.size(), before.size() + 1) << "the manager is its child, not ours";
  kill_and_wait(servers.back());
  expect_ok(manager);
  client::Handle other(perceptron_config(), {.method = StartMethod::forkserver});
  expect_ok(other);
  kill_manager(manager);
  EXPECT_THAT(manager.step().error, testing::HasSubstr("how it ended is not known"));
  expect_ok(other);
  other.stop();
  ipc::end_zygote();
  EXPECT_EQ(ipc::children(), before);
}

TEST(Zygote, ThatIsStoppedHoldsNobodyUp) {
  const auto before = ipc::children();
  client::Handle manager(perceptron_config(), {.method = StartMethod::forkserver});
  const auto server = ipc::open_pidfd(ipc::children().back());
  ipc::send_signal(server.get(), SIGSTOP);
  expect_ok(manager);
  kill_manager(manager);
  EXPECT_THAT(manager.step().error, testing::HasSubstr("how it ended is not known"));
  manager.stop();
  ipc::end_zygote();
  EXPECT_EQ(ipc::children(), before);
}

}  // namespace
}  // namespace accelmgr::test
