// Tests that a launch with impossible values, devices, backends or nodes is refused. The error names the
// values that do not fit together, and the option that is wrong.
#include <limits>

#include "launcher/launch/nodes.hpp"

namespace accelmgr::launch {
namespace {

/// Expects that the launch is refused: `key` is the option that is wrong, and the error says all `parts`.
void expect_refused(const Options& options, const std::string& key, const std::vector<std::string>& parts,
                    const NodeInfo& node_info = cpu_node(2)) {
  SCOPED_TRACE(key + " and " + ::testing::PrintToString(parts));
  const auto [text, wrong] = refusal([&] { resolve(options, node_info); });
  EXPECT_TRUE(says(text, parts));
  EXPECT_EQ(wrong, key);
}

TEST(BadLaunch, IsRefusedWithWhatWasWrong) {
  expect_refused({.nprocs = 0}, "nprocs", {"nprocs is 0", "from 1 to 4096", "or -1"});
  expect_refused({.nprocs = -2}, "nprocs", {"nprocs is -2"});
  expect_refused({.nprocs = 4097}, "nprocs", {"nprocs is 4097"});
  expect_refused({.nnodes = -1}, "nnodes", {"nnodes is -1"});
  expect_refused({.node_rank = -2}, "node_rank", {"node_rank is -2"});
  expect_refused({.rank_offset = -1}, "rank_offset", {"rank_offset is -1"});
  expect_refused({.world_size = -1}, "world_size", {"world_size is -1"});
  expect_refused({.master_port = 65536}, "master_port", {"master_port is 65536", "65535"});
  expect_refused({.timeout_s = 0}, "timeout_s", {"timeout_s is 0"});
  expect_refused({.timeout_s = std::numeric_limits<double>::quiet_NaN()}, "timeout_s", {"timeout_s is nan"});
  expect_refused({.terminate_timeout_s = -1}, "terminate_timeout_s", {"terminate_timeout_s is -1"});
  expect_refused({.environment = {{"", "x"}}}, "environment", {"environment has ''"});
  expect_refused({.environment = {{"A=B", "x"}}}, "environment", {"environment has 'A=B'"});

  // Devices.
  expect_refused({.nprocs = 3}, "nprocs", {"nprocs is 3", "2 GPUs", "0,1", "oversubscribe"}, gpu_node(2));
  expect_refused({.nprocs = 3}, "nprocs", {"nprocs is 3", "2 GPUs", "3,1", "CUDA_VISIBLE_DEVICES"},
                 gpu_node(4, {{"CUDA_VISIBLE_DEVICES", "3,1"}}));
  expect_refused({.nprocs = 3, .gpus = "0,1"}, "gpus", {"'0,1'", "2 devices", "nprocs is 3", "oversubscribe"},
                 gpu_node(4));
  expect_refused({.nprocs = 2, .gpus = "0,1,2"}, "gpus", {"'0,1,2'", "3 devices", "nprocs is 2"},
                 gpu_node(4));
  expect_refused({.gpus = "4,6"}, "gpus", {"'6'", "(4,5", "CUDA_VISIBLE_DEVICES"},
                 gpu_node(8, {{"CUDA_VISIBLE_DEVICES", "4,5"}}));
  expect_refused({.gpus = "2"}, "gpus", {"'2'", "0,1", "2 GPUs"}, gpu_node(2));
  expect_refused({.gpus = "1,1", .oversubscribe = true}, "gpus", {"'1' twice"}, gpu_node(2));
  expect_refused({.gpus = "0,,1"}, "gpus", {"'0,,1'", "GPU ''"}, gpu_node(2));
  expect_refused({.gpus = "0"}, "gpus", {"gpus is '0'", "this machine has no GPU"});
  expect_refused({.gpus = "0"}, "gpus", {"none of the 2 GPUs", "CUDA_VISIBLE_DEVICES is ''"},
                 gpu_node(2, {{"CUDA_VISIBLE_DEVICES", ""}}));
  expect_refused({.gpus = "0", .xpus = "0"}, "xpus", {"gpus is '0'", "xpus is '0'"}, gpu_node(2));
  expect_refused({.xpus = "0"}, "xpus", {"xpus is '0'", "no xpu device is present", "cpu and gpu"},
                 gpu_node(2));
  expect_refused({.nprocs = 2, .xpus = "0,2"}, "xpus", {"xpus is '0,2'", "no xpu device"},
                 cpu_node(2, {{"XPU_VISIBLE_DEVICES", "0,1"}}));
  expect_refused({.backend = "bkcl"}, "backend", {"backend is bkcl", "no xpu device"}, gpu_node(2));
  expect_refused({.backend = "xccl"}, "backend", {"backend is xccl", "no custom device"},
                 cpu_node(2, {{"ACCELMGR_SELECTED_CUSTOMS", "0,1"}}));
  expect_refused({}, "backend", {"ACCELMGR_GPU_NUM_DEVICES is 2", "no GPU"},
                 cpu_node(2, {{"ACCELMGR_GPU_NUM_DEVICES", "2"}}));

  // Backends.
  expect_refused({.backend = "glo"}, "backend",
                 {"unknown backend 'glo'", "serial, shm, gloo, auto", "did you mean 'gloo'"});
  expect_refused({.backend = "mpi"}, "backend", {"serial, shm, gloo, nccl, auto"}, gpu_node(1));
  expect_refused(
      {.backend = "nccl"}, "backend",
      {"backend is nccl", "this machine has no GPU", "use backend shm on one node, gloo over several"});
  expect_refused({.nprocs = 2, .backend = "serial"}, "backend",
                 {"serial is for a world of one process", "has 2"});
  expect_refused({.backend = "shm", .ips = "10.0.0.1,10.0.0.2"}, "backend", {"shm", "2 nodes", "gloo"});
}

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
