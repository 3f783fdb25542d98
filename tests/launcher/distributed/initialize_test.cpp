// Tests of contexts that initialize() makes.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <limits>

#include "accelmgr/distributed_context.hpp"
#include "accelmgr/multiprocess_launch.hpp"
#include "launcher/collective/expect_error.hpp"
#include "launcher/contract/collective/meeting.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "reserved_port.hpp"
#include "temporary_folder.hpp"
#include "torchrun_agent.hpp"

namespace accelmgr::distributed {
namespace {

using collective::contract::Meeting;
using Cause = CollectiveError::Cause;
using test::expect_error;
using test::expect_on_ranks;
using test::expect_world_of;
using test::message_of;
using test::on_strangers;
using test::ReservedPort;
using testing::AllOf;
using testing::HasSubstr;

constexpr double short_s = 2;  // Long enough to find that the store answers, or that nobody serves it.

TEST(Initialize, ByAnAddress) {
  const ReservedPort port;
  const auto method = fmt::format("tcp://127.0.0.1:{}", port.number());
  on_strangers(3, {}, [&](int rank) {
    EXPECT_EQ(get_world_size(), 1);
    initialize("shm", {.timeout_s = 60, .init_method = method, .rank = rank, .world_size = 3});
    test::expect_place(rank, 3);
    expect_world_of(3);
    finalize();
    EXPECT_EQ(get_world_size(), 1);
  });
}

TEST(Initialize, ByAFile) {
  const test::TemporaryFolder folder;
  const auto file = (folder / "store").string();
  on_strangers(3, {}, [&](int rank) {
    initialize("auto", {.timeout_s = 60, .init_method = "file://" + file, .rank = rank, .world_size = 3});
    EXPECT_EQ(backend(), "shm");
    expect_world_of(3);
    finalize();
  });
  EXPECT_FALSE(std::filesystem::exists(file));
}

TEST(Initialize, ConnectsAtTheInterfaceThatIsChosen) {
  const ReservedPort port;
  const auto join = [&](int rank) {
    initialize("gloo", {.timeout_s = 60,
                        .init_method = fmt::format("tcp://127.0.0.1:{}", port.number()),
                        .rank = rank,
                        .world_size = 2});
    expect_world_of(2);
  };
  on_strangers(2, {{"GLOO_SOCKET_IFNAME", "lo"}}, join);
  on_strangers(2, {{"GLOO_SOCKET_IFNAME", "nowhere0"}}, [&](int rank) {
    EXPECT_THAT(message_of<ConfigError>([&] { join(rank); }), HasSubstr("'nowhere0'"));
  });
}

/// When rank 1 starts the next round, it may still connect to rank 0's store of the round before, and rank 0
/// ends that store meanwhile.
TEST(Initialize, WorldsFollowEachOtherAtOneAddress) {
  const auto memory = Meeting::create();
  const ReservedPort port;
  const auto init_method = fmt::format("tcp://127.0.0.1:{}", port.number());
  on_strangers(2, {}, [&](int rank) {
    Meeting meeting(memory.get());
    for (int round = 0; round < 12; ++round) {
      initialize("shm", {.timeout_s = 60, .init_method = init_method, .rank = rank, .world_size = 2});
      EXPECT_EQ(all_reduce(1.0), 2.0);
      if (rank == 1) finalize();
      meeting.meet(2);
      if (rank == 1) continue;
      // Takes about as long as rank 1 needs to connect again, and another time in each round.
      for (int connections = 0; connections < round % 4; ++connections)
        TcpStore::connect("127.0.0.1", port.number(), base::Deadline::in_seconds(60));
      finalize();
    }
  });
}

/// Rank `alone` tries before the other rank does, and fails. Then both ranks try and meet.
void expect_to_meet_at_the_next_attempt(int rank, int alone, InitializeOptions options, Meeting& meeting) {
  if (rank == alone) {
    options.timeout_s = together_s;
    EXPECT_THAT(message_of<CollectiveError>([&] { initialize("shm", options); }),
                HasSubstr(fmt::format("rank {}", 1 - alone)));
  }
  meeting.meet(2);
  options.timeout_s = 60;
  initialize("shm", options);
  expect_world_of(2);
  finalize();
}

class AttemptThatFailed : public testing::TestWithParam<int> {
 protected:
  void expect_next_to_succeed(const std::string& init_method) {
    on_strangers(2, {}, [&](int rank) {
      Meeting meeting(memory_.get());
      expect_to_meet_at_the_next_attempt(
          rank, GetParam(), {.init_method = init_method, .rank = rank, .world_size = 2}, meeting);
    });
  }

  const base::UniqueFd memory_ = Meeting::create();
};

TEST_P(AttemptThatFailed, AtAnAddressIsFollowedByOneThatSucceeds) {
  const ReservedPort port;
  expect_next_to_succeed(fmt::format("tcp://127.0.0.1:{}", port.number()));
}

TEST_P(AttemptThatFailed, AtAFileIsFollowedByOneThatSucceeds) {
  const test::TemporaryFolder folder;
  const auto file = (folder / "again").string();
  expect_next_to_succeed("file://" + file);
  EXPECT_FALSE(std::filesystem::exists(file));
}

/// The agent's store outlives the attempts, so it keeps the keys of all of them.
TEST_P(AttemptThatFailed, AtAnAgentIsFollowedByOneThatSucceeds) {
  Agent agent;
  on_strangers(2, agent.variables(2), [&](int rank) {
    Meeting meeting(memory_.get());
    std::unique_ptr<TcpStore> store;
    if (rank == GetParam()) store = agent.serve();
    for (const int alone : {GetParam(), 1 - GetParam()})
      expect_to_meet_at_the_next_attempt(rank, alone, {}, meeting);
    sync();
    barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(OfRank, AttemptThatFailed, testing::Values(0, 1));

TEST(Initialize, InOurLaunchUsesItsMemoryAndTakesTimeoutsBeyondAnyWait) {
  expect_on_ranks(2, [](int rank) {
    EXPECT_EQ(get_rank(), rank);
    initialize("shm", {.timeout_s = 1e12});
    EXPECT_EQ(model_name(), "accelmgr-dist");
    EXPECT_THROW(initialize("shm"), UsageError);
    expect_world_of(2);
    finalize();
    EXPECT_EQ(get_world_size(), 1);
    initialize("shm", {.timeout_s = std::numeric_limits<double>::infinity()});
    expect_world_of(2);
  });
}

TEST(Initialize, RanksThatContradictTheEnvironmentAreNamed) {
  expect_on_ranks(2, [](int rank) {
    EXPECT_THAT(
        message_of<ConfigError>([&] { initialize("shm", {.rank = 1 - rank}); }),
        AllOf(HasSubstr(fmt::format("rank is {}", 1 - rank)), HasSubstr(fmt::format("RANK={}", rank))));
    EXPECT_THAT(message_of<ConfigError>([] { initialize("shm", {.world_size = 3}); }),
                AllOf(HasSubstr("world_size is 3"), HasSubstr("WORLD_SIZE=2")));
  });
}

/// Joins two ranks at the port as `rank`. The other one does not come.
void expect_alone(int rank, const ReservedPort& port) {
  const auto place = fmt::format("127.0.0.1:{}", port.number());
  const InitializeOptions options{
      .timeout_s = short_s, .init_method = "tcp://" + place, .rank = rank, .world_size = 2};
  EXPECT_THAT(expect_error(Cause::timeout, {1 - rank}, [&] { initialize("shm", options); }),
              HasSubstr(place));
}

TEST(Initialize, NamesTheRanksThatDidNotComeAndWhereTheOthersWait) {
  const ReservedPort port;
  on_strangers(2, {}, [&](int rank) {
    if (rank == 1) return;
    expect_alone(0, port);
    EXPECT_EQ(model_name(), "serial");
  });
}

TEST(Initialize, AStoreThatNobodyServesIsNamed) { expect_alone(1, ReservedPort()); }

TEST(Initialize, ByAFileNamesTheRankThatDidNotComeAndTheFile) {
  const test::TemporaryFolder folder;
  const auto file = (folder / "lonely").string();
  EXPECT_THAT(message_of<CollectiveError>([&] {
                initialize(
                    "shm",
                    {.timeout_s = short_s, .init_method = "file://" + file, .rank = 0, .world_size = 2});
              }),
              AllOf(HasSubstr("rank 1"), HasSubstr("file://" + file)));
  EXPECT_FALSE(std::filesystem::exists(file));
}

TEST(Initialize, AMemoryThatIsGoneIsNamed) {
  const test::Variable rank("RANK", "0"), size("WORLD_SIZE", "2");
  const test::Variable local_rank("LOCAL_RANK", "0"), local_size("LOCAL_WORLD_SIZE", "2");
  const test::Variable memory("ACCELMGR_WORLD_MEMORY", "/nowhere/memory");
  EXPECT_THAT(
      message_of<SessionError>([] { initialize("shm"); }),
      AllOf(HasSubstr("ACCELMGR_WORLD_MEMORY=/nowhere/memory"), HasSubstr("No such file or directory"),
            HasSubstr("has the process that launched this one ended?")));
}

TEST(Initialize, TheTimeoutIsThatOfEveryCollective) {
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe2(ends.data(), O_CLOEXEC), 0);
  expect_on_ranks(2, [&](int rank) {
    initialize("shm", {.timeout_s = 2});
    char byte = 0;
    if (rank == 1) {
      EXPECT_EQ(read(ends[0], &byte, 1), 1);  // This rank lives, but does not join the call.
      return;
    }
    EXPECT_THAT(message_of<CollectiveError>([] { all_reduce(1.0); }),
                AllOf(HasSubstr("all_reduce"), HasSubstr("rank 1 did not arrive within 2 s")));
    EXPECT_EQ(write(ends[1], &byte, 1), 1);
  });
  for (const int end : ends) close(end);
}

TEST(Initialize, InOurLaunchNamesTheRankThatDidNotCome) {
  const auto memory = Meeting::create();
  expect_on_ranks(3, [&](int rank) {
    if (rank == 1) return;
    Meeting meeting(memory.get());
    const std::function<void()> attempts[]{[] { initialize("shm", {.timeout_s = together_s}); },
                                           [] { init_process_group_from_backend("shm", together_s); }};
    for (const auto& attempt : attempts) {
      meeting.meet(2);
      expect_error(Cause::timeout, {1}, attempt);
    }
  });
}

}  // namespace
}  // namespace accelmgr::distributed
