// Tests that a launch over impossible nodes is refused, with the reason.
#include <limits>

#include "launcher/launch/bad_launch.hpp"

namespace accelmgr::launch {
namespace {

constexpr const char* two_workers = "a:0;10.0.0.1:5000|a:1;10.0.0.2:5000";

TEST(BadNodes, AreRefusedWithWhatWasWrong) {
  expect_refused({.ips = "10.0.0.7,10.0.0.8"}, "ips",
                 {"10.0.0.7, 10.0.0.8", "node1.cluster", "127.0.0.1, 10.0.0.1", "node_rank"});
  expect_refused({.ips = "10.0.0.1,127.0.0.1"}, "ips", {"more than one", "10.0.0.1, 127.0.0.1"});
  expect_refused({.ips = "10.0.0.1,"}, "ips", {"'10.0.0.1,'", "empty address"});
  expect_refused({.nnodes = 65537}, "nnodes", {"nnodes is 65537", "65536"});
  expect_refused({.nprocs = 2, .rank_offset = std::numeric_limits<int>::max()}, "rank_offset",
                 {"2147483647", "world_size, which is 2"});
  expect_refused({.nnodes = 2}, "nnodes", {"2 nodes", "option nnodes", "ips, workers, or master_addr"});
  expect_refused({.nprocs = 2, .world_size = 6}, "nnodes", {"3 nodes", "ips, workers, or master_addr"});
  expect_refused({.ips = "10.0.0.1,10.0.0.2", .node_rank = 2}, "node_rank",
                 {"node_rank is 2", "2 nodes", "from 0"});
  expect_refused({.ips = "10.0.0.1,10.0.0.2", .nnodes = 3}, "ips",
                 {"3 according to option nnodes", "2 according to option ips"});
  expect_refused({.nprocs = 2, .world_size = 5}, "world_size",
                 {"world_size is 5", "nprocs, which is 2", "nnodes and node_rank"});
  expect_refused({.nprocs = 2, .ips = "10.0.0.1,10.0.0.2", .world_size = 6}, "world_size",
                 {"world_size is 6", "2 nodes", "make 4"});
  expect_refused({.nprocs = 2, .master_addr = "10.0.0.1", .nnodes = 3, .node_rank = 0, .world_size = 3},
                 "world_size", {"world_size is 3", "3 nodes"});
  expect_refused({.nprocs = 2, .master_addr = "10.0.0.1", .nnodes = 2, .node_rank = 1, .world_size = 5},
                 "world_size", {"world_size is 5", "make 4"});
  expect_refused({.nprocs = 2, .rank_offset = 1}, "rank_offset",
                 {"rank_offset is 1", "nprocs 2", "world_size, which is 2"});
  expect_refused({.nprocs = 2, .ips = "10.0.0.1,10.0.0.2", .rank_offset = 2}, "rank_offset",
                 {"rank_offset is 2", "node 0", "begin at 0"});
  expect_refused({.nprocs = 2, .master_addr = "10.0.0.1", .nnodes = 2, .rank_offset = 1}, "node_rank",
                 {"rank_offset is 1", "nprocs, which is 2", "set node_rank"});

  // Nodes that are workers.
  expect_refused({.workers = "a:0;10.0.0.1:5000|b"}, "workers", {"Bad worker syntax: b"});
  expect_refused({}, "workers", {"environment ACCELMGR_WORKERS", "Bad worker syntax: b"},
                 cpu_node(2, {{"ACCELMGR_WORKERS", "b"}}));
  expect_refused({}, "workers", {"environment ACCELMGR_TPU_CONFIG", "Bad worker syntax: a:0;h:1"},
                 cpu_node(2, {{"ACCELMGR_TPU_CONFIG", "a:0;h:1"}}));
  expect_refused({.workers = "a:0;10.0.0.1:5000"}, "nprocs",
                 {"option workers", "how many devices", "nprocs", "ACCELMGR_GPU_NUM_DEVICES"});
  expect_refused({}, "nprocs", {"environment ACCELMGR_LOCAL_WORKER", "how many devices"},
                 cpu_node(2, {{"ACCELMGR_LOCAL_WORKER", "a:0"}}));
  expect_refused({}, "nprocs", {"ACCELMGR_GPU_NUM_DEVICES is 'two'"},
                 gpu_node(2, {{"ACCELMGR_GPU_NUM_DEVICES", "two"}}));
  expect_refused({.nprocs = 3}, "nprocs", {"nprocs is 3", "2 devices", "ACCELMGR_GPU_NUM_DEVICES"},
                 gpu_node(4, {{"ACCELMGR_GPU_NUM_DEVICES", "2"}}));
  expect_refused({.nprocs = 1, .workers = two_workers}, "workers",
                 {"3 according to environment ACCELMGR_WORLD_SIZE", "2 according to option workers"},
                 cpu_node(2, {{"ACCELMGR_WORLD_SIZE", "3"}}));
  expect_refused({.nprocs = 2, .workers = two_workers, .world_size = 3}, "world_size",
                 {"world_size is 3", "2 nodes (option workers)", "make 4"});
  expect_refused({}, "workers", {"2 nodes (environment ACCELMGR_WORLD_SIZE)", "ACCELMGR_WORKERS"},
                 gpu_node(2, {{"ACCELMGR_WORLD_SIZE", "2"}, {"ACCELMGR_GPU_NUM_DEVICES", "2"}}));
  expect_refused({}, "nnodes", {"ACCELMGR_WORLD_SIZE is 'all'"},
                 gpu_node(2, {{"ACCELMGR_WORLD_SIZE", "all"}, {"ACCELMGR_GPU_NUM_DEVICES", "2"}}));
  expect_refused({.nprocs = 1, .workers = two_workers}, "workers",
                 {"ACCELMGR_LOCAL_WORKER is 'a:2'", "a:0;", "a:1;"},
                 cpu_node(2, {{"ACCELMGR_LOCAL_WORKER", "a:2"}}));
  expect_refused({.nprocs = 1, .workers = two_workers}, "workers", {"Bad worker syntax: a-2"},
                 cpu_node(2, {{"ACCELMGR_LOCAL_WORKER", "a-2"}}));
  expect_refused({.node_rank = 0}, "workers", {"Bad worker syntax: a-2"},
                 cpu_node(8, {{"ACCELMGR_LOCAL_WORKER", "a-2"}, {"ACCELMGR_TPU_NUM_DEVICES", "2"}}));
  expect_refused({}, "nprocs", {"ACCELMGR_TPU_NUM_DEVICES is '0'", "from 1 to 4096"},
                 cpu_node(8, {{"ACCELMGR_TPU_CONFIG", "t;0;h:1"}, {"ACCELMGR_TPU_NUM_DEVICES", "0"}}));
  expect_refused({.nprocs = 9}, "nprocs", {"nprocs is 9", "8 devices", "default: the TPU form"},
                 cpu_node(16, {{"ACCELMGR_TPU_CONFIG", "t;0;h:1"}}));
  expect_refused({.nprocs = 1, .workers = "a:0;10.0.0.7:5000|a:1;10.0.0.8:5000"}, "workers",
                 {"none of workers (10.0.0.7, 10.0.0.8)", "node1.cluster"});
  expect_refused({.nprocs = 2, .workers = "a:0;10.0.0.1:65535"}, "workers", {"10.0.0.1:65535", "65536"});
  expect_refused({}, "workers", {"ACCELMGR_TPU_NUM_DEVICES", "ACCELMGR_TPU_CONFIG or ACCELMGR_LOCAL_WORKER"},
                 cpu_node(2, {{"ACCELMGR_TPU_NUM_DEVICES", "4"}}));
  expect_refused({}, "workers", {"environment ACCELMGR_SERVICE_ADDRESS", "'here' is not HOST:PORT"},
                 gpu_node(2, {{"ACCELMGR_GPU_NUM_DEVICES", "2"}, {"ACCELMGR_SERVICE_ADDRESS", "here"}}));
}

}  // namespace
}  // namespace accelmgr::launch
