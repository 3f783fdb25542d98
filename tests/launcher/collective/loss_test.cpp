// Tests of how a call of the shm backend ends when a member is stopped, has left, or never joined.
// tests/launcher/contract/collective tests what all backends promise when a member has died or is late.
#include <gtest/gtest.h>

#include <vector>

#include "expect_error.hpp"
#include "refusal.hpp"
#include "worlds.hpp"

namespace accelmgr::collective {
namespace {

using accelmgr::test::expect_error;
using accelmgr::test::says;
using ipc::test::end_of;
using test::checked_child;
using test::long_s;
using Cause = CollectiveError::Cause;

std::shared_ptr<Communicator> join(const base::UniqueFd& world, int rank, double timeout_s = long_s) {
  return shm::join_world(world.get(), rank, {.timeout_s = timeout_s, .world_ranks = {}});
}

TEST(LossOfAMember, FreesItsRankForTheNextProcess) {
  const auto world = shm::create_world(2);
  const auto rank = checked_child([&] {
    const auto communicator = join(world, 1);
    kill(getpid(), SIGKILL);
  });
  EXPECT_EQ(end_of(rank), "killed by signal 9 (KILL)");
  EXPECT_EQ(join(world, 1)->rank(), 1);
}

TEST(StoppedMember, IsMissingAtTheDeadline) {
  constexpr double timeout_s = 3;
  const auto world = shm::create_world(3);
  std::vector<ipc::Child> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(checked_child([&] {
      const auto communicator = join(world, rank);
      communicator->barrier();
      if (rank == 1) kill(getpid(), SIGSTOP);
      expect_error(Cause::timeout, {1},
                   [&] { communicator->barrier({.shape = {}, .timeout_s = timeout_s}); });
      expect_error(Cause::broken, {1}, [&] { communicator->barrier(); });
    }));
  }
  EXPECT_EQ(end_of(ranks[0]), "exit code 0");
  EXPECT_EQ(end_of(ranks[2]), "exit code 0");
  siginfo_t info{};
  waitid(P_PID, static_cast<id_t>(ranks[1].pid), &info, WSTOPPED | WNOWAIT);
  kill(ranks[1].pid, SIGCONT);  // It gets the same error as the others.
  EXPECT_EQ(end_of(ranks[1]), "exit code 0");
}

TEST(MemberThatNeverJoined, IsNamedAtTheDeadline) {
  const auto world = shm::create_world(4);
  const auto communicator = join(world, 1, 0.05);
  EXPECT_TRUE(says(expect_error(Cause::timeout, {0, 2, 3}, [&] { communicator->barrier(); }),
                   {"ranks 0, 2, 3 did not arrive within 0.05 s"}));
}

TEST(MemberOfOneNodeAmongSeveral, IsNamedByItsRankInTheWorld) {
  const auto world = shm::create_world(2);
  const auto communicator = shm::join_world(world.get(), 0, {.timeout_s = 0.05, .world_ranks = {4, 7}});
  EXPECT_EQ(communicator->ranks(), (std::vector<int>{4, 7}));
  expect_error(Cause::timeout, {7}, [&] { communicator->barrier(); });
}

TEST(MemberThatLeft, IsSaidToHaveLeft) {
  const auto world = shm::create_world(2);
  auto left = join(world, 0);
  const auto stays = join(world, 1);
  left.reset();
  EXPECT_TRUE(says(expect_error(Cause::lost, {0}, [&] { stays->barrier(); }), {"rank 0 has left"}));
}

TEST(MemberThatLeft, WakesWhoWaitsForIt) {
  const auto world = shm::create_world(2);
  auto left = join(world, 0);
  const auto stays = join(world, 1);
  std::jthread leaves([&] { left.reset(); });
  expect_error(Cause::lost, {0}, [&] { stays->barrier(); });
}

TEST(MemberThatLeft, HadStillTakenPartInItsLastCall) {
  const auto world = shm::create_world(2);
  const auto stays = join(world, 1);
  std::jthread leaves([&] { join(world, 0)->broadcast_object("last words", 0); });
  EXPECT_EQ(stays->broadcast_object("", 0), "last words");
}

}  // namespace
}  // namespace accelmgr::collective
