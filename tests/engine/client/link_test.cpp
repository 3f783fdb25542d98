#include "engine/client/link.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "accelmgr/errors.hpp"
#include "base/ipc/socket.hpp"
#include "message_of.hpp"

namespace accelmgr::client {
namespace {

using test::message_of;

/// A link to a manager that is this process itself: the test holds the manager's end of the socket.
struct LinkTest : testing::Test {
  std::pair<base::UniqueFd, base::UniqueFd> sockets = ipc::socket_pair();
  const base::UniqueFd& manager = sockets.second;
  Link link{std::move(sockets.first), {getpid(), ipc::open_pidfd(getpid())}};

  void say(const protocol::Notice& notice) const {
    ASSERT_TRUE(protocol::send_notice(manager.get(), notice));
  }
  static base::Deadline now() { return base::Deadline::at_ns(0); }
};

/// A process that has ended and has been reaped.
ipc::Child ended_process() {
  auto child = ipc::fork_self([] { _exit(0); });
  EXPECT_TRUE(ipc::wait_ended(child.pidfd.get(), base::Deadline::in_seconds(10)));
  EXPECT_TRUE(ipc::take_exit_status(child.pidfd.get()));
  return child;
}

TEST_F(LinkTest, KnowsTheEndOfARunnerByThePidfdOfItsGeneration) {
  EXPECT_FALSE(link.holds(3, 1));
  auto process = ended_process();
  say(protocol::Joined{3, 1, process.pid, std::move(process.pidfd)});
  link.take_notices();
  EXPECT_TRUE(link.holds(3, 1));
  EXPECT_FALSE(link.holds(3, 2));
  EXPECT_TRUE(link.runner_ended(3));
  EXPECT_TRUE(link.wait_until_others_ended(now()));
  say(protocol::Joined{3, 2, getpid(), ipc::open_pidfd(getpid())});
  link.take_notices();
  EXPECT_TRUE(link.holds(3, 2));
  EXPECT_FALSE(link.runner_ended(3));
  EXPECT_FALSE(link.wait_until_others_ended(now()));
}

TEST_F(LinkTest, WaitsForTheForkServerOfNow) {
  say(protocol::Relaunched{ipc::open_pidfd(getpid())});
  link.take_notices();
  EXPECT_FALSE(link.wait_until_others_ended(now()));
  say(protocol::Relaunched{ended_process().pidfd});
  link.take_notices();
  EXPECT_TRUE(link.wait_until_others_ended(now()));
}

TEST_F(LinkTest, TakesNoLateAnswerForThatOfTheNextQuestion) {
  EXPECT_THAT(message_of<SessionError>([&] { link.take_resized(now()); }),
              testing::HasSubstr("did not answer in time"));
  say(protocol::Resized{"late"});
  say(protocol::Resized{"in time"});
  EXPECT_EQ(link.take_resized(base::Deadline::in_seconds(10)).refused, "in time");
}

TEST_F(LinkTest, GivesCheckpointsOnceAndInOrder) {
  for (const std::uint64_t step : {4u, 7u}) {
    protocol::Saved saved;
    saved.step = step;
    say(saved);
  }
  const auto saved = link.take_saved();
  ASSERT_EQ(saved.size(), 2u);
  EXPECT_EQ(saved[0].step, 4u);
  EXPECT_EQ(saved[1].step, 7u);
  EXPECT_TRUE(link.take_saved().empty());
}

TEST_F(LinkTest, HearsWhatIsSaidAndTheEndOfTheSocket) {
  EXPECT_FALSE(link.hears_soon(now()));
  say(protocol::Resized{});
  EXPECT_TRUE(link.hears_soon(base::Deadline::in_seconds(10)));
  link.take_notices();
  EXPECT_FALSE(link.hears_soon(now()));
  sockets.second.reset();
  EXPECT_TRUE(link.hears_soon(base::Deadline::in_seconds(10)));
}

TEST_F(LinkTest, LooksUpFromALongWait) {
  const auto begin = base::now_ns();
  EXPECT_FALSE(link.hears_soon(base::Deadline::in_seconds(3600)));
  EXPECT_LT(base::now_ns() - begin, std::int64_t{60'000'000'000});
}

TEST(Link, ToAManagerThatHasEndedSaysHowToGoOn) {
  auto [ours, theirs] = ipc::socket_pair();
  Link link(std::move(ours), ended_process());
  EXPECT_TRUE(link.manager_ended());
  EXPECT_THAT(message_of<SessionError>([&] { link.send(protocol::Resize{2}); }),
              testing::HasSubstr("recover() starts a new one"));
  EXPECT_THAT(message_of<SessionError>([&] { link.take_resized(base::Deadline::in_seconds(10)); }),
              testing::HasSubstr("ended before it answered"));
}

}  // namespace
}  // namespace accelmgr::client
