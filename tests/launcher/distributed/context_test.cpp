// Tests of contexts that come from the environment (set by torchrun or by hand), and of contexts that
// initialize() makes.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>

#include "accelmgr/distributed_context.hpp"
#include "accelmgr/multiprocess_launch.hpp"
#include "base/ipc/network.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/processes.hpp"
#include "base/log.hpp"
#include "base/log_tail.hpp"
#include "launcher/contract/collective/meeting.hpp"
#include "launcher/distributed/store/tcp_store.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "reserved_port.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::distributed {
namespace {

using collective::contract::Meeting;
using test::expect_on_ranks;
using test::message_of;
using test::on_strangers;
using test::ReservedPort;
using testing::AllOf;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

constexpr double short_s = 2;  // Long enough to find that the store answers, or that nobody serves it.
/// Where several processes must do something within the time: a busy machine may stop one of them meanwhile.
constexpr double together_s = 1.5;

/// The environment that torchrun's agent sets.
Variables torchrun_variables(int port, int world_size) {
  return {{"RANK", "{rank}"},
          {"LOCAL_RANK", "{rank}"},
          {"WORLD_SIZE", std::to_string(world_size)},
          {"LOCAL_WORLD_SIZE", std::to_string(world_size)},
          {"GROUP_RANK", "0"},
          {"GROUP_WORLD_SIZE", "1"},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
          {"TORCHELASTIC_RESTART_COUNT", "2"}};
}

/// The agent of torchrun, with a port that is bound here. A rank serves the store, because its threads would
/// not survive a fork.
class Agent {
 public:
  Agent() : socket_(ipc::bind_tcp("127.0.0.1", 0)), port_(ipc::bound_port(socket_.get())) {}
  Variables variables(int world_size) const { return torchrun_variables(port_, world_size); }
  /// Call it in one rank, before that rank connects.
  std::unique_ptr<TcpStore> serve() { return TcpStore::serve(std::move(socket_)); }
  int port() const { return port_; }

 private:
  base::UniqueFd socket_;
  int port_;
};

TEST(ContextOfTorchrun, IsFoundWhenFirstAskedForAndJoinedAtTheFirstCollective) {
  Agent agent;
  on_strangers(3, agent.variables(3), [&](int rank) {
    // No process serves the store yet, and the getters do not connect.
    EXPECT_EQ(get_rank(), rank);
    EXPECT_EQ(get_world_size(), 3);
    EXPECT_EQ(get_local_rank(), rank);
    EXPECT_EQ(get_nproc_per_node(), 3);
    EXPECT_EQ(get_nnodes(), 1);
    EXPECT_EQ(get_node_rank(), 0);
    EXPECT_EQ(model_name(), "native-dist");
    EXPECT_EQ(backend(), "shm");
    std::unique_ptr<TcpStore> store;
    if (rank == 2) store = agent.serve();
    EXPECT_EQ(all_reduce(rank + 1.0), 6.0);
    EXPECT_THAT(all_gather(std::to_string(rank)), ElementsAre("0", "1", "2"));
    EXPECT_EQ(all_reduce(1.0, "SUM", std::vector<int>{0, 2}), rank == 1 ? 1.0 : 2.0);
    barrier();
    return Value();
  });
}

TEST(ContextOfTorchrun, IsLeftAndJoinedAgain) {
  Agent agent;
  on_strangers(2, agent.variables(2), [&](int rank) {
    std::unique_ptr<TcpStore> store;
    if (rank == 0) store = agent.serve();
    for (int round = 0; round < 3; ++round) {
      initialize("shm");
      EXPECT_EQ(model_name(), "native-dist");
      EXPECT_EQ(all_reduce(1.0), 2.0);
      barrier();
      finalize();
      EXPECT_EQ(model_name(), "serial");
      EXPECT_EQ(get_world_size(), 1);
    }
    // The environment still describes the context that finalize() left: sync() joins it again.
    sync();
    EXPECT_EQ(get_world_size(), 2);
    EXPECT_EQ(all_reduce(1.0), 2.0);
    barrier();
    return Value();
  });
}

/// Runs `body` in a child, as a launcher runs a program, and expects it to succeed.
void expect_program(const std::function<void()>& body) {
  EXPECT_EQ(ipc::test::end_of(ipc::test::fork_child([&] {
              body();
              return testing::Test::HasFailure() ? 1 : 0;
            })),
            "exit code 0");
}

TEST(ContextOfTorchrun, ARankOfTheNextProgramThatIsEarlyDoesNotJoinTheWorldOfTheOneBefore) {
  Agent agent;
  const auto memory = Meeting::create();
  on_strangers(2, agent.variables(2), [&](int rank) {
    Meeting meeting(memory.get());
    ipc::Child server;
    if (rank == 0)
      server = ipc::test::fork_child([&] {
        const auto store = agent.serve();
        ipc::test::hang();
        return 0;
      });
    expect_program([] {
      initialize("shm");
      EXPECT_EQ(all_reduce(1.0), 2.0);
      barrier();
    });
    meeting.meet(2);
    if (rank == 1)
      expect_program([] {
        EXPECT_THAT(message_of<CollectiveError>([] { initialize("shm", {.timeout_s = together_s}); }),
                    HasSubstr("rank 0 did not join the rendezvous"));
      });
    meeting.meet(2);
    expect_program([] {
      initialize("shm");
      EXPECT_EQ(all_reduce(1.0), 2.0);
      barrier();
    });
    if (rank == 0) ipc::end_group(server, base::Deadline::at_ns(0));
    return Value();
  });
}

TEST(ContextOfTorchrun, ARankThatIsEarlyAtTheStoreOfALaunchThatEndsGoesToTheNext) {
  const ReservedPort port;
  const auto serve = [&] { return TcpStore::serve(ipc::bind_tcp("127.0.0.1", port.number())); };
  const auto meet_once = [] {
    initialize("shm", {.timeout_s = 60});
    EXPECT_EQ(all_reduce(1.0), 2.0);
    barrier();
    finalize();
  };
  on_strangers(2, torchrun_variables(port.number(), 2), [&](int rank) {
    auto store = rank == 0 ? serve() : nullptr;
    meet_once();
    if (store) {
      const auto deadline = base::Deadline::in_seconds(60);
      const auto seat = store->get("accelmgr/attempt_2/last", deadline) + "/seat/1";
      while (store->add(seat, 0) < 2 && !deadline.passed()) std::this_thread::yield();
      EXPECT_EQ(store->add(seat, 0), 2) << "rank 1 has not come for the second world";
      store.reset();
      store = serve();
    }
    meet_once();
    return Value();
  });
}

TEST(ContextByHand, NeedsNoMoreThanRanksAndAnAddress) {
  const ReservedPort port;
  const Variables variables{{"RANK", "{rank}"},
                            {"WORLD_SIZE", "2"},
                            {"MASTER_ADDR", "127.0.0.1"},
                            {"MASTER_PORT", std::to_string(port.number())}};
  on_strangers(2, variables, [](int rank) {
    // There is no agent: rank 0 serves the store.
    EXPECT_EQ(get_local_rank(), rank);
    EXPECT_EQ(all_reduce(1.0), 2.0);
    EXPECT_EQ(get_nproc_per_node(), 2);
    EXPECT_EQ(get_nnodes(), 1);
    barrier();
    return Value();
  });
}

TEST(ContextByHand, MayBeMadeAndEndedLater) {
  expect_on_ranks(1, [](int) {
    EXPECT_EQ(get_world_size(), 1);
    const test::Variable rank("RANK", "1"), size("WORLD_SIZE", "4"), local("LOCAL_WORLD_SIZE", std::nullopt);
    const test::Variable local_rank("LOCAL_RANK", std::nullopt), address("MASTER_ADDR", "10.0.0.1");
    EXPECT_EQ(get_rank(), 1);
    EXPECT_EQ(get_world_size(), 4);
    // Without LOCAL_RANK a process cannot know which ranks share its host.
    EXPECT_THAT(message_of<UsageError>([] { get_nnodes(); }),
                AllOf(HasSubstr("initialize()"), HasSubstr("LOCAL_RANK")));
    EXPECT_THROW(get_local_rank(), UsageError);
    set_local_rank(1);
    EXPECT_EQ(get_local_rank(), 1);
    {
      const test::Variable later("WORLD_SIZE", "2");
      EXPECT_EQ(get_world_size(), 4);
      sync();
      EXPECT_EQ(get_world_size(), 2);
    }
    sync(/*temporary=*/true);
    EXPECT_EQ(get_world_size(), 4);
    const test::Variable again("WORLD_SIZE", "3");
    EXPECT_EQ(get_world_size(), 3);
    const test::Variable gone("RANK", std::nullopt);
    EXPECT_EQ(model_name(), "serial");
    sync();
    finalize();
  });
}

TEST(ContextByHand, ThatContradictsItselfIsRefused) {
  const test::Variable rank("RANK", "3"), size("WORLD_SIZE", "2");
  EXPECT_THROW(get_rank(), ConfigError);
  EXPECT_THROW(initialize("shm"), ConfigError);
}

TEST(ContextByHand, WithoutAnAddressIsNamedByTheFirstCollective) {
  const test::Variable rank("RANK", "0"), size("WORLD_SIZE", "2"), port("MASTER_PORT", "1");
  EXPECT_EQ(get_world_size(), 2);
  EXPECT_THAT(message_of<ConfigError>([] { barrier(); }), HasSubstr("MASTER_ADDR is not set"));
  {
    const test::Variable address("MASTER_ADDR", "127.0.0.1"), none("MASTER_PORT", std::nullopt);
    EXPECT_THAT(message_of<ConfigError>([] { initialize("shm"); }), HasSubstr("MASTER_PORT is not set"));
  }
  finalize();
}

TEST(Initialize, ByAnAddress) {
  const ReservedPort port;
  const auto method = fmt::format("tcp://127.0.0.1:{}", port.number());
  on_strangers(3, {}, [&](int rank) {
    EXPECT_EQ(get_world_size(), 1);
    initialize("shm", {.timeout_s = 60, .init_method = method, .rank = rank, .world_size = 3});
    EXPECT_EQ(get_rank(), rank);
    EXPECT_EQ(get_local_rank(), rank);
    EXPECT_EQ(get_nproc_per_node(), 3);
    EXPECT_EQ(get_nnodes(), 1);
    EXPECT_EQ(all_reduce(1.0), 3.0);
    barrier();
    finalize();
    EXPECT_EQ(get_world_size(), 1);
    return Value();
  });
}

TEST(Initialize, ByAFile) {
  const test::TemporaryFolder folder;
  const auto file = (folder / "store").string();
  on_strangers(3, {}, [&](int rank) {
    initialize("auto", {.timeout_s = 60, .init_method = "file://" + file, .rank = rank, .world_size = 3});
    EXPECT_EQ(backend(), "shm");
    EXPECT_EQ(all_reduce(1.0), 3.0);
    barrier();
    finalize();
    return Value();
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
    EXPECT_EQ(all_reduce(1.0), 2.0);
    barrier();
    return Value();
  };
  on_strangers(2, {{"GLOO_SOCKET_IFNAME", "lo"}}, join);
  on_strangers(2, {{"GLOO_SOCKET_IFNAME", "nowhere0"}}, [&](int rank) {
    EXPECT_THAT(message_of<ConfigError>([&] { join(rank); }), HasSubstr("'nowhere0'"));
    return Value();
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
    return Value();
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
  EXPECT_EQ(all_reduce(1.0), 2.0);
  barrier();
  finalize();
}

class AttemptThatFailed : public testing::TestWithParam<int> {
 protected:
  void expect_next_to_succeed(const std::string& init_method) {
    on_strangers(2, {}, [&](int rank) {
      Meeting meeting(memory_.get());
      expect_to_meet_at_the_next_attempt(
          rank, GetParam(), {.init_method = init_method, .rank = rank, .world_size = 2}, meeting);
      return Value();
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
    return Value();
  });
}

INSTANTIATE_TEST_SUITE_P(OfRank, AttemptThatFailed, testing::Values(0, 1));

TEST(Initialize, InOurLaunchUsesItsMemory) {
  expect_on_ranks(2, [](int rank) {
    EXPECT_EQ(get_rank(), rank);
    initialize("shm");
    EXPECT_EQ(model_name(), "accelmgr-dist");
    EXPECT_THROW(initialize("shm"), UsageError);
    EXPECT_EQ(all_reduce(1.0), 2.0);
    barrier();
    finalize();
    EXPECT_EQ(get_world_size(), 1);
    initialize("shm");
    EXPECT_EQ(all_reduce(1.0), 2.0);
    barrier();
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

TEST(Initialize, NamesTheRanksThatDidNotComeAndWhereTheOthersWait) {
  const ReservedPort port;
  on_strangers(2, {}, [&](int rank) {
    if (rank == 1) return Value();
    try {
      initialize("shm", {.timeout_s = short_s,
                         .init_method = fmt::format("tcp://127.0.0.1:{}", port.number()),
                         .rank = 0,
                         .world_size = 2});
      ADD_FAILURE() << "rank 1 never came";
    } catch (const CollectiveError& error) {
      EXPECT_EQ(error.cause(), CollectiveError::Cause::timeout);
      EXPECT_THAT(error.ranks(), ElementsAre(1));
      EXPECT_THAT(error.what(), HasSubstr(fmt::format("127.0.0.1:{}", port.number())));
    }
    EXPECT_EQ(model_name(), "serial");
    return Value();
  });
}

TEST(Initialize, AStoreThatNobodyServesIsNamed) {
  const ReservedPort port;
  try {
    initialize("shm", {.timeout_s = short_s,
                       .init_method = fmt::format("tcp://127.0.0.1:{}", port.number()),
                       .rank = 1,
                       .world_size = 2});
    ADD_FAILURE() << "nobody serves";
  } catch (const CollectiveError& error) {
    EXPECT_EQ(error.cause(), CollectiveError::Cause::timeout);
    EXPECT_THAT(error.ranks(), ElementsAre(0));
    EXPECT_THAT(error.what(), HasSubstr(fmt::format("127.0.0.1:{}", port.number())));
  }
}

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

TEST(Initialize, TakesTimeoutsBeyondAnyWait) {
  expect_on_ranks(2, [](int) {
    for (const double timeout_s : {1e12, std::numeric_limits<double>::infinity()}) {
      initialize("shm", {.timeout_s = timeout_s});
      EXPECT_EQ(all_reduce(1.0), 2.0);
      barrier();
      finalize();
    }
  });
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
      try {
        attempt();
        ADD_FAILURE() << "rank 1 never came";
      } catch (const CollectiveError& error) {
        EXPECT_THAT(error.ranks(), ElementsAre(1)) << error.what();
      }
    }
  });
}

TEST(Context, IsNotInheritedByAFork) {
  expect_on_ranks(2, [](int) {
    EXPECT_EQ(all_reduce(1.0), 2.0);
    const auto pid = fork();
    if (pid == 0) {
      for (const char* name : {"RANK", "WORLD_SIZE"}) unsetenv(name);
      _exit(get_world_size() == 1 && model_name() == "serial" ? 0 : 1);
    }
    int status = 1;
    waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(all_reduce(1.0), 2.0);
  });
}

TEST(ShowConfig, WritesTenLines) {
  expect_on_ranks(2, [](int rank) {
    std::array<char, 4096> text{};
    std::atomic<std::uint64_t> written{0};
    base::keep_log_tail(text, written);
    show_config();
    const auto lines = base::log_lines(text, written.load(), 100);
    base::drop_log_tail();
    EXPECT_THAT(
        lines,
        ElementsAre(EndsWith("distributed configuration: accelmgr-dist"), EndsWith("backend: shm"),
                    EndsWith("device: cpu"), EndsWith("hostname: " + hostname()), EndsWith("world size: 2"),
                    EndsWith(fmt::format("] rank: {}", rank)), EndsWith(fmt::format("local rank: {}", rank)),
                    EndsWith("num processes per_node: 2"), EndsWith("num nodes: 1"),
                    EndsWith("node rank: 0")));
  });
}

}  // namespace
}  // namespace accelmgr::distributed
