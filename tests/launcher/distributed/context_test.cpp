// Tests of contexts that come from the environment, set by torchrun or by hand.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>

#include "accelmgr/distributed_context.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/processes.hpp"
#include "launcher/contract/collective/meeting.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "reserved_port.hpp"
#include "torchrun_agent.hpp"

namespace accelmgr::distributed {
namespace {

using collective::contract::Meeting;
using test::expect_on_ranks;
using test::expect_world_of;
using test::message_of;
using test::on_strangers;
using test::ReservedPort;
using testing::AllOf;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;

TEST(ContextOfTorchrun, IsFoundWhenFirstAskedForAndJoinedAtTheFirstCollective) {
  Agent agent;
  on_strangers(3, agent.variables(3), [&](int rank) {
    // No process serves the store yet, and the getters do not connect.
    test::expect_place(rank, 3);
    EXPECT_EQ(model_name(), "native-dist");
    EXPECT_EQ(backend(), "shm");
    std::unique_ptr<TcpStore> store;
    if (rank == 2) store = agent.serve();
    EXPECT_EQ(all_reduce(rank + 1.0), 6.0);
    EXPECT_THAT(all_gather(std::to_string(rank)), ElementsAre("0", "1", "2"));
    EXPECT_EQ(all_reduce(1.0, "SUM", std::vector<int>{0, 2}), rank == 1 ? 1.0 : 2.0);
    barrier();
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
      expect_world_of(2);
      finalize();
      EXPECT_EQ(model_name(), "serial");
      EXPECT_EQ(get_world_size(), 1);
    }
    // The environment still describes the context that finalize() left: sync() joins it again.
    sync();
    EXPECT_EQ(get_world_size(), 2);
    expect_world_of(2);
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
      expect_world_of(2);
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
      expect_world_of(2);
    });
    if (rank == 0) ipc::end_group(server, base::Deadline::at_ns(0));
  });
}

TEST(ContextOfTorchrun, ARankThatIsEarlyAtTheStoreOfALaunchThatEndsGoesToTheNext) {
  const ReservedPort port;
  const auto serve = [&] { return TcpStore::serve(ipc::bind_tcp("127.0.0.1", port.number())); };
  const auto meet_once = [] {
    initialize("shm", {.timeout_s = 60});
    expect_world_of(2);
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
    expect_world_of(2);
    test::expect_place(rank, 2);
  });
}

TEST(ContextByHand, MayBeMadeAndEndedLater) {
  expect_on_ranks(1, [](int) {
    EXPECT_EQ(get_world_size(), 1);
    const test::Variable rank("RANK", "1"), size("WORLD_SIZE", "4"), local("LOCAL_WORLD_SIZE", std::nullopt);
    const test::Variable local_rank("LOCAL_RANK", std::nullopt), address("MASTER_ADDR", "10.0.0.1");
    EXPECT_EQ(get_rank(), 1);
    EXPECT_EQ(get_world_size(), 4);
    // Without LOCAL_RANK a process cannot know which ranks share its node.
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

TEST(Context, IsNotInheritedByAFork) {
  expect_on_ranks(2, [](int) {
    EXPECT_EQ(all_reduce(1.0), 2.0);
    expect_program([] {
      for (const char* name : {"RANK", "WORLD_SIZE"}) unsetenv(name);
      EXPECT_EQ(get_world_size(), 1);
      EXPECT_EQ(model_name(), "serial");
    });
    EXPECT_EQ(all_reduce(1.0), 2.0);
  });
}

TEST(ShowConfig, WritesTenLines) {
  expect_on_ranks(2, [](int rank) {
    EXPECT_THAT(
        test::log_lines_of(show_config),
        ElementsAre(EndsWith("distributed configuration: accelmgr-dist"), EndsWith("backend: shm"),
                    EndsWith("device: cpu"), EndsWith("hostname: " + hostname()), EndsWith("world size: 2"),
                    EndsWith(fmt::format("] rank: {}", rank)), EndsWith(fmt::format("local rank: {}", rank)),
                    EndsWith("num processes per_node: 2"), EndsWith("num nodes: 1"),
                    EndsWith("node rank: 0")));
  });
}

}  // namespace
}  // namespace accelmgr::distributed
