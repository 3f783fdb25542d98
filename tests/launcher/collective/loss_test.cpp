// Tests of how a call of the shm backend ends when a member does not take part: the member has died, is
// stopped, has left, or never joined.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "message_of.hpp"
#include "worlds.hpp"

namespace accelmgr::collective {
namespace {

using accelmgr::test::message_of;
using test::long_s;
using test::Processes;
using test::Shared;
using test::wait_for;
using Cause = CollectiveError::Cause;

constexpr double bound_s = 20;  // 0.2 s are promised for a machine that is not busy.

std::shared_ptr<Communicator> join(const base::UniqueFd& world, int rank, double timeout_s = long_s) {
  return shm::join_world(world.get(), rank, {.timeout_s = timeout_s, .world_ranks = {}});
}

/// The CollectiveError that `call` throws. The test fails if there is none.
template <class Call>
CollectiveError error_of(Call call) {
  try {
    call();
  } catch (const CollectiveError& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return {"", Cause::mismatch, {}};
}

/// A phase in which a member of three is killed.
struct Phase {
  const char* name;
  /// Runs on the member that dies. `die` notes the time and kills the process.
  void (*last)(Communicator& world, const std::function<void()>& die);
  /// Runs on the other members, where it must fail.
  void (*call)(Communicator& world);
  /// The cause of the other members' next error on the same communicator. A group that does not form does not
  /// break its parent.
  Cause next = Cause::broken;
};

/// Makes an all-reduce of several short rounds.
void long_all_reduce(Communicator& world) {
  static std::vector<float> data(400'000, 1.0f);
  world.all_reduce(data.data(), data.data(), data.size(), DType::float32, ReduceOp::sum);
}

const Phase phases[] = {
    {"before it arrives", [](Communicator&, const std::function<void()>& die) { die(); },
     [](Communicator& world) { world.barrier(); }},
    {"between two calls",
     [](Communicator& world, const std::function<void()>& die) {
       world.barrier();
       die();
     },
     [](Communicator& world) {
       world.barrier();
       world.barrier();
     }},
    {"in the middle of a buffer",
     [](Communicator& world, const std::function<void()>& die) {
       std::jthread killer([&] { die(); });
       for (;;) long_all_reduce(world);
     },
     [](Communicator& world) {
       for (;;) long_all_reduce(world);
     }},
    {"while a group is formed", [](Communicator&, const std::function<void()>& die) { die(); },
     [](Communicator& world) {
       const int all[] = {0, 1, 2};
       world.group(all);
     },
     Cause::lost},
};

TEST(LossOfAMember, EndsTheCallOfAllOthersInEveryPhase) {
  for (const auto& phase : phases) {
    SCOPED_TRACE(phase.name);
    struct State {
      std::atomic<std::int64_t> died_ns;
      std::atomic<int> joined;
    };
    Shared<State> state;
    const auto world = shm::create_world(3);
    Processes ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.start([&] {
        const auto communicator = join(world, rank);
        state->joined.fetch_add(1);
        wait_for(state->joined, 3);
        if (rank == 2) {
          phase.last(*communicator, [&] {
            state->died_ns.store(base::now_ns());
            kill(getpid(), SIGKILL);
          });
        }
        const auto error = error_of([&] { phase.call(*communicator); });
        const double after_s = static_cast<double>(base::now_ns() - state->died_ns.load()) / 1e9;
        EXPECT_EQ(error.cause(), Cause::lost) << error.what();
        EXPECT_EQ(error.ranks(), std::vector<int>{2}) << error.what();
        EXPECT_LT(after_s, bound_s);
        const auto next = error_of([&] { communicator->barrier(); });
        EXPECT_EQ(next.cause(), phase.next) << next.what();
        EXPECT_EQ(next.ranks(), std::vector<int>{2}) << next.what();
      });
    }
    EXPECT_EQ(ranks.end_of(0), "exit code 0");
    EXPECT_EQ(ranks.end_of(1), "exit code 0");
    EXPECT_EQ(ranks.end_of(2), "killed by signal 9 (KILL)");
  }
}

TEST(LossOfAMember, LeavesAGroupOfTheOthers) {
  const auto world = shm::create_world(4);
  Processes ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.start([&] {
      const auto communicator = join(world, rank);
      communicator->barrier();
      if (rank == 1) kill(getpid(), SIGKILL);
      EXPECT_EQ(error_of([&] { communicator->barrier(); }).cause(), Cause::lost);
      const int rest[] = {0, 2, 3};
      const auto group = communicator->group(rest);
      EXPECT_EQ(group->ranks(), (std::vector<int>{0, 2, 3}));
      std::int32_t sum = rank;
      group->all_reduce(&sum, &sum, 1, DType::int32, ReduceOp::sum);
      EXPECT_EQ(sum, 5);
    });
  }
  for (int rank : {0, 2, 3}) EXPECT_EQ(ranks.end_of(static_cast<std::size_t>(rank)), "exit code 0");
}

TEST(LossOfAMember, FreesItsRankForTheNextProcess) {
  const auto world = shm::create_world(2);
  Processes ranks;
  ranks.start([&] {
    const auto communicator = join(world, 1);
    kill(getpid(), SIGKILL);
  });
  EXPECT_EQ(ranks.end_of(0), "killed by signal 9 (KILL)");
  EXPECT_EQ(join(world, 1)->rank(), 1);
}

TEST(StoppedMember, IsMissingAtTheDeadline) {
  constexpr double timeout_s = 3;
  const auto world = shm::create_world(3);
  Processes ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.start([&] {
      const auto communicator = join(world, rank);
      communicator->barrier();
      if (rank == 1) kill(getpid(), SIGSTOP);
      const auto error = error_of([&] { communicator->barrier({.shape = {}, .timeout_s = timeout_s}); });
      EXPECT_EQ(error.cause(), Cause::timeout) << error.what();
      EXPECT_EQ(error.ranks(), std::vector<int>{1}) << error.what();
      EXPECT_EQ(error_of([&] { communicator->barrier(); }).cause(), Cause::broken);
    });
  }
  EXPECT_EQ(ranks.end_of(0), "exit code 0");
  EXPECT_EQ(ranks.end_of(2), "exit code 0");
  ranks.wait_stopped(1);
  ranks.signal(1, SIGCONT);  // It gets the same error as the others.
  EXPECT_EQ(ranks.end_of(1), "exit code 0");
}

TEST(MemberThatNeverJoined, IsNamedAtTheDeadline) {
  const auto world = shm::create_world(4);
  const auto communicator = join(world, 1, 0.05);
  const auto error = error_of([&] { communicator->barrier(); });
  EXPECT_EQ(error.cause(), Cause::timeout);
  EXPECT_EQ(error.ranks(), (std::vector<int>{0, 2, 3}));
  EXPECT_NE(std::string(error.what()).find("ranks 0, 2, 3 did not arrive within 0.05 s"), std::string::npos)
      << error.what();
}

TEST(MemberOfOneHostAmongSeveral, IsNamedByItsRankInTheWorld) {
  const auto world = shm::create_world(2);
  const auto communicator = shm::join_world(world.get(), 0, {.timeout_s = 0.05, .world_ranks = {4, 7}});
  EXPECT_EQ(communicator->ranks(), (std::vector<int>{4, 7}));
  EXPECT_EQ(error_of([&] { communicator->barrier(); }).ranks(), std::vector<int>{7});
}

TEST(MemberThatLeft, IsSaidToHaveLeft) {
  const auto world = shm::create_world(2);
  auto left = join(world, 0);
  const auto stays = join(world, 1);
  left.reset();
  const auto error = error_of([&] { stays->barrier(); });
  EXPECT_EQ(error.cause(), Cause::lost);
  EXPECT_EQ(error.ranks(), std::vector<int>{0});
  EXPECT_NE(std::string(error.what()).find("rank 0 has left"), std::string::npos) << error.what();
}

TEST(MemberThatLeft, WakesWhoWaitsForIt) {
  const auto world = shm::create_world(2);
  auto left = join(world, 0);
  const auto stays = join(world, 1);
  std::jthread leaves([&] { left.reset(); });
  EXPECT_EQ(error_of([&] { stays->barrier(); }).cause(), Cause::lost);
}

TEST(MemberThatLeft, HadStillTakenPartInItsLastCall) {
  const auto world = shm::create_world(2);
  const auto stays = join(world, 1);
  std::jthread leaves([&] { join(world, 0)->broadcast_object("last words", 0); });
  EXPECT_EQ(stays->broadcast_object("", 0), "last words");
}

TEST(GroupThatFailedToForm, IsTheSameFailureForWhoComesLater) {
  const auto world = shm::create_world(2);
  const auto first = join(world, 0);
  const auto second = join(world, 1);
  const int both[] = {0, 1};
  const CallOptions impatient{.shape = {}, .timeout_s = 0.05};
  EXPECT_EQ(error_of([&] { first->group(both, impatient); }).cause(), Cause::timeout);
  EXPECT_EQ(error_of([&] { second->group(both); }).ranks(), std::vector<int>{1});
  // The next attempt is the second one of both ranks.
  std::jthread other([&] { EXPECT_EQ(second->group(both)->rank(), 1); });
  EXPECT_EQ(first->group(both)->rank(), 0);
}

TEST(ForkedChild, DoesNotDisturbTheRankItComesFrom) {
  const auto world = shm::create_world(2);
  auto communicator = join(world, 0);
  Processes children;
  children.start([&] {
    const auto refuses = [](const auto& call) {
      const auto message = message_of<UsageError>(call);
      EXPECT_NE(message.find("this communicator belongs to the process that forked this one"),
                std::string::npos)
          << message;
    };
    refuses([&] { communicator->barrier(); });
    const int alone[] = {0};
    refuses([&] { communicator->group(alone); });
    communicator.reset();
  });
  EXPECT_EQ(children.end_of(0), "exit code 0");
  std::jthread other([&] { join(world, 1)->barrier(); });
  communicator->barrier();
}

}  // namespace
}  // namespace accelmgr::collective
