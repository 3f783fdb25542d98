#include "accelmgr/multiprocess_launch.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <stdexcept>

#include "base/ipc/network.hpp"
#include "base/ipc/processes.hpp"
#include "base/ipc/tcp.hpp"
#include "launcher/distributed/multiprocess/process_group.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "reserved_port.hpp"

namespace accelmgr {
namespace {

using launch::StartMethod;
using launch::Value;
using test::config_key_of;
using test::expect_on_ranks;
using test::message_of;
using test::Variable;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;

/// Throws, and so fails its launch, unless every rank has its place in the world.
Value check_ranks(int rank, const Value& args) {
  const int world_size = distributed::get_world_size();
  const bool right = args.at(0) == world_size && rank == distributed::get_rank() &&
                     distributed::get_local_rank() == rank && distributed::all_reduce(1.0) == world_size &&
                     distributed::all_reduce(1.0, "SUM", parallel_groups().data) == world_size;
  if (!right) throw std::runtime_error(fmt::format("rank {} is not right", rank));
  return {};
}

Value set_up(int, const Value&) {
  ::setenv("ACCELMGR_TEST_SET_UP", "yes", 1);
  return {};
}

Value needs_set_up(int, const Value&) {
  if (std::getenv("ACCELMGR_TEST_SET_UP") == nullptr) throw std::runtime_error("was not set up");
  return {};
}

const bool registered = [] {
  launch::register_function("check ranks", check_ranks);
  launch::register_function("set up", set_up);
  launch::register_function("needs set-up", needs_set_up);
  return true;
}();

MultiprocessConfig config_of(int world_size, StartMethod method = StartMethod::fork) {
  MultiprocessConfig config;
  config.world_size = world_size;
  config.launch_method = method;
  return config;
}

TEST(MultiprocessConfig, IsResolvedOnceAndKeepsItsPort) {
  MultiprocessConfig config;
  MultiprocessConfig::resolve(config);
  EXPECT_GE(config.world_size, 1);
  EXPECT_EQ(config.local_world_size, config.world_size);
  ASSERT_TRUE(config.master_port);
  EXPECT_GE(*config.master_port, 29500);
  // The port stays bound: neither another process nor another configuration gets it.
  EXPECT_THAT(message_of<ConfigError>([&] { ipc::bind_tcp("127.0.0.1", *config.master_port); }),
              HasSubstr(std::to_string(*config.master_port)));
  MultiprocessConfig other;
  MultiprocessConfig::resolve(other);
  EXPECT_NE(other.master_port, config.master_port);
  const auto before = config.text();
  MultiprocessConfig::resolve(config);
  EXPECT_EQ(config.text(), before);
}

TEST(MultiprocessConfig, OneNodeRunsTheWholeWorldHoweverManyGpusItHas) {
  for (const int gpus : {0, 1, 2, 4}) {
    auto config = config_of(2);
    resolve(config, gpus);
    EXPECT_EQ(config.local_world_size, 2) << gpus;
  }
  auto several_nodes = config_of(4);
  several_nodes.master_addr = "10.0.0.1";
  resolve(several_nodes, 2);
  EXPECT_EQ(several_nodes.local_world_size, 2);
}

TEST(MultiprocessConfig, WhatCannotBeIsNamed) {
  const auto expect_refused = [](const std::string& key, const std::string& part, const auto& change) {
    auto config = config_of(4);
    change(config);
    const auto refused = test::refusal([&] { MultiprocessConfig::resolve(config); });
    EXPECT_EQ(refused.key, key);
    EXPECT_TRUE(test::says(refused, {part}));
  };
  expect_refused("world_size", "world_size is 0", [](auto& c) { c.world_size = 0; });
  expect_refused("local_world_size", "is 5; in a world of 4 it must be 1 to 4",
                 [](auto& c) { c.local_world_size = 5; });
  expect_refused("rank", "rank is 4", [](auto& c) { c.rank = 4; });
  expect_refused("local_rank", "with 2 processes on this node",
                 [](auto& c) { c.local_world_size = 2, c.local_rank = 2; });
  expect_refused("master_port", "65535", [](auto& c) { c.master_port = 65536; });
  expect_refused("master_addr", "master_addr is empty", [](auto& c) { c.master_addr = ""; });
  expect_refused("model_parallelism", "", [](auto& c) { c.model_parallelism = 3; });
  expect_refused("launch.backend", "", [](auto& c) { c.backend = "smh"; });
  expect_refused("launch.backend", "", [](auto& c) { c.data_parallel_backend = "mpi"; });
  for (const auto* method : {"udp://x:1", "tcp://x"})
    expect_refused("init_method", "", [method](auto& c) { c.init_method = method; });
}

TEST(MultiprocessConfig, OfTheLaunchPartOfAConfiguration) {
  Config from;
  from.launch.nprocs = 2;
  from.launch.nnodes = 3;
  from.launch.rendezvous = "10.0.0.1:2222";
  from.launch.backend = "gloo";
  from.launch.model_parallelism = 2;
  from.launch.pipeline_parallelism = 3;
  from.launch.model_parallel_backend = "shm";
  from.launch.start_method = StartMethod::fork;
  EXPECT_EQ(MultiprocessConfig::of(from).text(),
            "rank = -1\nlocal_rank = -1\nworld_size = 6\nlocal_world_size = 2\nmaster_addr = 10.0.0.1\n"
            "master_port = 2222\ninit_method = env://\nmodel_parallelism = 2\npipeline_parallelism = 3\n"
            "backend = gloo\nmodel_parallel_backend = shm\npipeline_parallel_backend = unset\n"
            "data_parallel_backend = unset\nlaunch_method = fork\n");
  const auto defaults = MultiprocessConfig::of(Config());
  EXPECT_EQ(defaults.world_size, std::nullopt);
  EXPECT_EQ(defaults.backend, std::nullopt);
}

TEST(MultiprocessConfig, OfAnyPortOfOneNodeLeavesThePortOpen) {
  Config from;
  from.launch.rendezvous = "127.0.0.1:0";
  const auto config = MultiprocessConfig::of(from);
  EXPECT_EQ(config.master_addr, "127.0.0.1");
  EXPECT_EQ(config.master_port, std::nullopt);
}

TEST(DistributedBackend, IsOursBeforeTorchsBeforeTheDefault) {
  const Variable ours("ACCELMGR_DISTRIBUTED_BACKEND", std::nullopt);
  const Variable torchs("TORCH_DISTRIBUTED_BACKEND", std::nullopt);
  EXPECT_EQ(get_distributed_backend(), default_backend());
  {
    const Variable of_torch("TORCH_DISTRIBUTED_BACKEND", "gloo");
    EXPECT_EQ(get_distributed_backend(), "gloo");
    set_distributed_backend("shm");
    EXPECT_EQ(get_distributed_backend(), "shm");
  }
  EXPECT_EQ(config_key_of([] { set_distributed_backend("mpi"); }), "launch.backend");
}

TEST(DistributedBackend, OfAVariableThatIsNoneNamesTheVariable) {
  const Variable rank("RANK", "0"), size("WORLD_SIZE", "1");
  const Variable ours("ACCELMGR_DISTRIBUTED_BACKEND", std::nullopt);
  const Variable torchs("TORCH_DISTRIBUTED_BACKEND", "mpi");
  EXPECT_THAT(message_of<ConfigError>([] { init_process_group_from_backend(); }),
              HasSubstr("TORCH_DISTRIBUTED_BACKEND=mpi: "));
  const Variable ours_first("ACCELMGR_DISTRIBUTED_BACKEND", "smh");
  EXPECT_THAT(message_of<ConfigError>([] { init_process_group_from_backend(); }),
              HasSubstr("ACCELMGR_DISTRIBUTED_BACKEND=smh: "));
}

TEST(InitDist, SetsTheEnvironmentAndJoins) {
  const test::ReservedPort reserved;
  const int port = reserved.number();
  test::on_strangers(2, {}, [port](int rank) {
    init_dist(rank, rank, 2, 2, "127.0.0.1", port, "env://");
    EXPECT_EQ(distributed::get_rank(), rank);
    EXPECT_STREQ(std::getenv("RANK"), std::to_string(rank).c_str());
    EXPECT_STREQ(std::getenv("LOCAL_WORLD_SIZE"), "2");
    EXPECT_STREQ(std::getenv("MASTER_PORT"), std::to_string(port).c_str());
    test::expect_world_of(2);
  });
  EXPECT_EQ(config_key_of([] { init_dist(2, 0, 2, 2, "127.0.0.1", 1, "env://"); }), "rank");
  EXPECT_EQ(config_key_of([] { init_dist(0, -1, 2, 2, "127.0.0.1", 1, "env://"); }), "rank");
}

TEST(ParallelGroups, OfEachRankAreThoseOfTheLayout) {
  expect_on_ranks(4, [](int rank) {
    EXPECT_THAT(message_of<UsageError>([] { parallel_groups(); }), HasSubstr("init_parallelism()"));
    init_parallelism(2, 1);
    const auto groups = parallel_groups();
    EXPECT_THAT(groups.model.ranks(), ElementsAre(rank / 2 * 2, rank / 2 * 2 + 1));
    EXPECT_THAT(groups.data.ranks(), ElementsAre(rank % 2, rank % 2 + 2));
    EXPECT_THAT(groups.pipeline.ranks(), ElementsAre(rank));
    // First the model groups all reduce at the same time, then the data groups. Nothing orders the groups of
    // different ranks, so their calls may interleave.
    for (int round = 0; round < 50; ++round) {
      EXPECT_EQ(distributed::all_reduce(rank, "SUM", groups.model), rank / 2 * 4 + 1);
      EXPECT_EQ(distributed::all_reduce(rank, "SUM", groups.data), rank % 2 * 2 + 2);
      EXPECT_EQ(distributed::all_reduce(rank, "SUM", groups.pipeline), rank);
    }
    EXPECT_EQ(config_key_of([] { init_parallelism(3, 1); }), "model_parallelism");
    distributed::finalize();
    EXPECT_THROW(parallel_groups(), UsageError);
  });
}

TEST(ParallelGroups, OfASerialProcessAreItself) {
  const auto groups = init_parallelism();
  EXPECT_EQ(groups.data.size(), 1);
  EXPECT_EQ(distributed::all_reduce(2.0, "SUM", groups.model), 2.0);
  distributed::finalize();
}

TEST(LaunchSubprocesses, RunsTheFunctionInEachRank) {
  launch_subprocesses(launch::Function(check_ranks), config_of(3), "", 0, {3});
  launch_subprocesses("check ranks", config_of(2, StartMethod::forkserver), "", 0, {2});
}

TEST(LaunchSubprocesses, OneRankRunsInPlaceWithoutSetUpLeavesNothingBehindAndIsWarnedOf) {
  const Variable rank("RANK", std::nullopt), set_up("ACCELMGR_TEST_SET_UP", std::nullopt);
  bool called = false;
  const auto lines = test::log_lines_of([&called] {
    launch_subprocesses(launch::Function([&called](int r, const Value& args) {
                          called = true;
                          return check_ranks(r, args);
                        }),
                        config_of(1), "set up", 0, {1});
  });
  EXPECT_TRUE(called);
  EXPECT_EQ(std::getenv("RANK"), nullptr);
  EXPECT_EQ(std::getenv("ACCELMGR_TEST_SET_UP"), nullptr);
  EXPECT_EQ(distributed::model_name(), "serial");
  EXPECT_THAT(lines,
              Contains(HasSubstr("launch_subprocesses: the world has one rank; it runs in this process")));
}

TEST(LaunchSubprocesses, ThePortOfTheMasterIsFreeForTheRanks) {
  const launch::Function binds = [](int rank, const Value&) {
    if (rank == 0) ipc::bind_tcp("127.0.0.1", std::stoi(std::getenv("MASTER_PORT")));
    return Value();
  };
  const auto launch_twice = [&] {
    auto config = config_of(2);
    MultiprocessConfig::resolve(config);
    for (int launch = 0; launch < 2; ++launch) launch_subprocesses(binds, config);
  };
  // Another process may take the port in between, but not each time.
  for (int tries = 1;; ++tries) {
    try {
      return launch_twice();
    } catch (const launch::SpawnError& error) {
      if (tries == 20 || std::string_view(error.what()).find("is in use") == std::string_view::npos) throw;
    }
  }
}

TEST(InitAndRun, NeedsTheRanks) {
  EXPECT_EQ(message_of<ConfigError>([] { init_and_run(check_ranks, config_of(1)); }),
            "init_and_run(): rank is -1 and local_rank -1; both must be 0 or more");
}

TEST(LaunchSubprocesses, SetUpComesBeforeTheFunction) {
  launch_subprocesses("needs set-up", config_of(2), "set up");
  EXPECT_THAT(message_of<launch::SpawnError>([] { launch_subprocesses("needs set-up", config_of(2)); }),
              HasSubstr("was not set up"));
}

TEST(LaunchSubprocesses, OffsetsOfTheRanksMakeOneWorldOfSeveralNodes) {
  // Two launches of one rank each on this node. A child of this process makes the second.
  const test::ReservedPort reserved;
  const int port = reserved.number();
  const launch::Function body = [](int rank, const Value&) -> Value {
    if (distributed::get_rank() != rank || distributed::get_local_rank() != 0 ||
        distributed::get_nnodes() != 2 || distributed::backend() != "gloo" ||
        distributed::all_reduce(rank + 1.0) != 3)
      throw std::runtime_error(fmt::format("rank {} is not right", rank));
    return {};
  };
  const auto launch_from = [&](int offset) {
    auto config = config_of(2);
    config.local_world_size = 1;
    config.master_port = port;
    config.backend = "gloo";
    launch_subprocesses(body, config, "", offset);
  };
  const auto second = ipc::test::fork_child([&] {
    launch_from(1);
    return 0;
  });
  launch_from(0);
  EXPECT_EQ(ipc::test::end_of(second), "exit code 0");
}

TEST(LaunchSubprocesses, AnOffsetOutsideTheWorldIsRefused) {
  for (const int offset : {1, -1})
    EXPECT_EQ(config_key_of([&] { launch_subprocesses("check ranks", config_of(2), "", offset); }),
              "rank_offset");
}

}  // namespace
}  // namespace accelmgr
