// Tests of distributed::spawn(), which calls a function in processes that have already joined a context.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "accelmgr/distributed_context.hpp"
#include "base/ipc/network.hpp"
#include "base/ipc/processes.hpp"
#include "base/ipc/tcp.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "reserved_port.hpp"

namespace accelmgr::distributed {
namespace {

using launch::StartMethod;
using test::config_key_of;
using test::message_of;
using test::ReservedPort;
using testing::HasSubstr;

Value describe_context(int local_rank, const Value& args) {
  return {{"local_rank", local_rank},  {"args", args},
          {"model", model_name()},     {"backend", backend().value_or("")},
          {"world", get_world_size()}, {"sum", all_reduce(get_rank() + 1.0)}};
}

const bool registered = [] {
  launch::register_function("describe context", describe_context);
  return true;
}();

SpawnOptions forked(int processes) {
  SpawnOptions options;
  options.nproc_per_node = processes;
  options.start_method = StartMethod::fork;
  options.timeout_s = 20;
  return options;
}

TEST(Spawn, CallsTheFunctionInAContextWithItsArguments) {
  for (const auto method : {StartMethod::fork, StartMethod::spawn, StartMethod::forkserver}) {
    auto options = forked(2);
    options.start_method = method;
    const auto context = spawn("shm", "describe context", {1, "a"}, {{"d", 23}}, options);
    ASSERT_EQ(context.results().size(), 2u);
    for (int rank = 0; rank < 2; ++rank)
      EXPECT_EQ(context.results()[static_cast<std::size_t>(rank)], (Value{{"local_rank", rank},
                                                                          {"args", {1, "a", {{"d", 23}}}},
                                                                          {"model", "accelmgr-dist"},
                                                                          {"backend", "shm"},
                                                                          {"world", 2},
                                                                          {"sum", 3.0}}));
  }
}

TEST(Spawn, OneProcessIsAProcessOfItsOwn) {
  const auto context = spawn("shm", launch::Function(describe_context), Value::array(), nullptr, forked(1));
  EXPECT_NE(context.pids().at(0), getpid());
  EXPECT_EQ(context.results().at(0).at("world"), 1);
  EXPECT_EQ(context.results().at(0).at("args"), Value::array());
  EXPECT_EQ(model_name(), "serial");
}

TEST(Spawn, OptionsThatCannotBeAreNamed) {
  const auto expect_refused = [](const std::string& key, const std::string& backend, const auto& change) {
    auto options = forked(1);
    change(options);
    EXPECT_EQ(config_key_of([&] { spawn(backend, "describe context", Value::array(), nullptr, options); }),
              key);
  };
  expect_refused("launch.backend", "mpi", [](auto&) {});
  expect_refused("nproc_per_node", "shm", [](auto& o) { o.nproc_per_node = 0; });
  expect_refused("nnodes", "shm", [](auto& o) { o.nnodes = 0; });
  expect_refused("node_rank", "gloo", [](auto& o) { o.nnodes = 2, o.node_rank = 2; });
  expect_refused("master_port", "shm", [](auto& o) { o.master_port = 70000; });
  expect_refused("init_method", "shm", [](auto& o) { o.nproc_per_node = 2, o.init_method = "udp://x:1"; });
  EXPECT_THAT(message_of<UsageError>([] {
                spawn("shm", "describe context", Value::array(), {1, 2}, forked(1));
              }),
              HasSubstr("kwargs is of type array"));
}

TEST(Spawn, NodesMeetAtAStoreThatTheFirstOneServes) {
  // Two nodes of one rank each on this node. A child of this process starts the second.
  const ReservedPort reserved;
  const int port = reserved.number();
  const auto node = [port](int node_rank) {
    auto options = forked(1);
    options.nnodes = 2;
    options.node_rank = node_rank;
    options.master_port = port;
    options.join = false;
    const auto launched = [&] {
      auto context = spawn("gloo", launch::Function(describe_context), Value::array(), nullptr, options);
      context.join();
      return context.results().at(0);
    };
    launched();
    return launched();  // The store of the first launch has ended with it.
  };
  const auto expect_right = [&node](int node_rank) {
    const auto result = node(node_rank);
    EXPECT_EQ(result.at("world"), 2);
    EXPECT_EQ(result.at("backend"), "gloo");
    EXPECT_EQ(result.at("sum"), 3.0);
    return testing::Test::HasFailure() ? 1 : 0;
  };
  const auto second = ipc::test::fork_child([&] { return expect_right(1); });
  expect_right(0);
  EXPECT_EQ(ipc::test::end_of(second), "exit code 0");
}

}  // namespace
}  // namespace accelmgr::distributed
