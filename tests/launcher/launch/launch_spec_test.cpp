// Tests of the launch spec: the values of options that the user left open, and the source of each value.
#include <fmt/format.h>

#include "launcher/launch/nodes.hpp"
#include "launcher/launch/plan/child_environment.hpp"

namespace accelmgr::launch {
namespace {

TEST(Defaults, FollowTheDevicesAndTheNodes) {
  const auto expect = [](const std::string& what, const NodeInfo& node_info, const Options& options = {}) {
    const auto spec = resolve(options, node_info);
    EXPECT_EQ(fmt::format("{} {} {} ({})", spec.device, spec.backend, spec.nprocs, spec.sources.at("nprocs")),
              what);
  };
  const std::string nodes = "10.0.0.1,10.0.0.2";
  expect("cpu shm 3 (default: 3 cores)", cpu_node(3));
  expect("cpu shm 2 (option)", cpu_node(3), {.nprocs = 2});
  expect("cpu gloo 3 (default: 3 cores)", cpu_node(3), {.ips = nodes});
  expect("cpu serial 1 (default: serial is one process)", cpu_node(3), {.backend = "serial"});
  expect("gpu nccl 4 (default: 4 GPUs)", gpu_node(4));
  expect("gpu nccl 4 (default: 4 GPUs)", gpu_node(4), {.ips = nodes});
  expect("gpu nccl 3 (option gpus)", gpu_node(4), {.gpus = "3,1,0"});
  expect("gpu shm 1 (option gpus)", gpu_node(4), {.backend = "shm", .gpus = "3"});
  expect("cpu gloo 4 (default: 4 GPUs)", gpu_node(4), {.backend = "gloo"});
  expect("gpu nccl 2 (environment CUDA_VISIBLE_DEVICES)", gpu_node(4, {{"CUDA_VISIBLE_DEVICES", "2,3"}}));
  expect("cpu shm 8 (default: 8 cores)", gpu_node(4, {{"CUDA_VISIBLE_DEVICES", ""}}));
  expect("gpu nccl 2 (environment ACCELMGR_GPU_NUM_DEVICES)",
         gpu_node(4, {{"ACCELMGR_GPU_NUM_DEVICES", "2"}}));
  expect("cpu shm 8 (default: the TPU form)", cpu_node(9, {{"ACCELMGR_TPU_CONFIG", "t;0;h:1"}}));
  expect("cpu shm 4 (environment ACCELMGR_TPU_NUM_DEVICES)",
         cpu_node(9, {{"ACCELMGR_TPU_NUM_DEVICES", "4"}, {"ACCELMGR_LOCAL_WORKER", "t:0"}}));
}

TEST(LaunchSpec, FindsThisNodeAmongTheAddresses) {
  for (const std::string other : {"10.0.0.9", "node9"})
    for (const std::string own : {"10.0.0.1", "node1", "NODE1.cluster", "fd00:0:0:0:0:0:0:1"}) {
      const auto spec = resolve({.nprocs = 2, .ips = other + ", " + own}, cpu_node(2));
      EXPECT_EQ(spec.node_rank, 1) << own;
      EXPECT_EQ(spec.rank_offset, 2);
      EXPECT_EQ(spec.world_size, 4);
      EXPECT_EQ(spec.master_addr, other);
      EXPECT_EQ(spec.master_port, 2222);
      EXPECT_EQ(spec.sources.at("node_rank"), "option ips");
    }
}

TEST(LaunchSpec, TakesOneAddressAsThisNode) {
  const auto spec = resolve({.nprocs = 1, .ips = "192.168.7.7"}, cpu_node(2));
  EXPECT_EQ(spec.nnodes, 1);
  EXPECT_EQ(spec.master_addr, "192.168.7.7");
}

TEST(LaunchSpec, BelievesTheNodeRankOverTheAddresses) {
  const auto spec = resolve({.nprocs = 1, .ips = "a,b,c", .node_rank = 2}, cpu_node(2));
  EXPECT_EQ(spec.rank(0), 2);
  EXPECT_EQ(spec.sources.at("node_rank"), "option");
}

TEST(LaunchSpec, TellsTheNodeByItsWorker) {
  const Options options = {.nprocs = 1, .workers = "a:5;10.0.0.2:1|b:9;10.0.0.1:1"};
  const auto by_address = resolve(options, cpu_node(2));
  EXPECT_EQ(by_address.node_rank, 1);
  EXPECT_EQ(by_address.sources.at("node_rank"), "option workers");
  const auto by_name = resolve(options, cpu_node(2, {{"ACCELMGR_LOCAL_WORKER", "a:5"}}));
  EXPECT_EQ(by_name.node_rank, 0);
  EXPECT_EQ(by_name.sources.at("node_rank"), "environment ACCELMGR_LOCAL_WORKER");
}

TEST(LaunchSpec, PrefersTheWorkersOfTheOptions) {
  const auto node_info = cpu_node(2, {{"ACCELMGR_WORKERS", "b:0;10.0.0.1:7"}});
  EXPECT_EQ(resolve({.nprocs = 1}, node_info).xla.workers.front().name, "b");
  EXPECT_EQ(resolve({.nprocs = 1, .workers = "a:0;10.0.0.1:7"}, node_info).xla.workers.front().name, "a");
}

TEST(LaunchSpec, CountsTheNodesOfAWorldBySize) {
  const auto spec =
      resolve({.nprocs = 2, .master_addr = "10.0.0.1", .rank_offset = 4, .world_size = 6}, cpu_node(2));
  EXPECT_EQ(spec.nnodes, 3);
  EXPECT_EQ(spec.node_rank, 2);
  EXPECT_EQ(spec.rank(1), 5);
}

TEST(LaunchSpec, AllowsNodesThatDiffer) {
  const auto spec = resolve({.nprocs = 2,
                             .master_addr = "10.0.0.1",
                             .master_port = 29500,
                             .nnodes = 2,
                             .node_rank = 1,
                             .rank_offset = 3,
                             .world_size = 5},
                            cpu_node(2));
  EXPECT_EQ(spec.world_size, 5);
  EXPECT_EQ(spec.rank(0), 3);
  EXPECT_TRUE(spec.endpoints.empty());
}

TEST(LaunchSpec, DealsGpusInTurnWhereProcessesShareThem) {
  using Ids = std::vector<std::string>;
  EXPECT_EQ(resolve({.nprocs = 5, .oversubscribe = true}, gpu_node(2)).visible_devices,
            (Ids{"0", "1", "0", "1", "0"}));
  EXPECT_EQ(resolve({.nprocs = 3, .gpus = "3,2", .oversubscribe = true}, gpu_node(4)).visible_devices,
            (Ids{"3", "2", "3"}));
}

TEST(LaunchSpecWarnings, TellOfMoreProcessesThanCores) {
  EXPECT_TRUE(resolve({.nprocs = 2}, cpu_node(2)).warnings.empty());
  const auto warnings = resolve({.nprocs = 3}, cpu_node(2)).warnings;
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_TRUE(says(warnings.front(), {"3 processes", "2 cores"}));
  EXPECT_TRUE(resolve({.nprocs = 16, .oversubscribe = true}, gpu_node(1)).warnings.empty());
}

TEST(LaunchSpecWarnings, TellOfGpusThatABackendOfCpusLeavesIdle) {
  const auto warnings = resolve({.nprocs = 1, .backend = "gloo"}, gpu_node(2)).warnings;
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_TRUE(says(warnings.front(), {"gloo", "CPUs", "0,1"}));
  EXPECT_TRUE(resolve({.nprocs = 1, .backend = "gloo"}, cpu_node(2)).warnings.empty());
}

TEST(LaunchSpecWarnings, TellOfTpusWithoutADriver) {
  const auto warnings = resolve({.nprocs = 2, .workers = "t;0;h:1"}, cpu_node(2)).warnings;
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_TRUE(says(warnings.front(), {"TPU", "CPUs"}));
}

TEST(LaunchSpecText, SaysEveryValueAndItsSource) {
  Options options = {
      .nprocs = 2, .ips = "10.0.0.1,10.0.0.2", .timeout_s = 7.5, .environment = {{"TOKEN", "secret"}}};
  const auto printed = text(resolve(options, gpu_node(4, {{"CUDA_VISIBLE_DEVICES", "2,3"}})));
  EXPECT_TRUE(says(
      printed,
      {"device = gpu  (environment CUDA_VISIBLE_DEVICES)\n", "backend = nccl  (default: GPUs)\n",
       "nprocs = 2  (option)\n", "visible_devices = 2,3  (environment CUDA_VISIBLE_DEVICES)\n",
       "nnodes = 2  (option ips)\n", "node_rank = 0  (option ips)\n", "world_size = 4  (nprocs * nnodes)\n",
       "rank_offset = 0  (nprocs * node_rank)\n", "ips = 10.0.0.1,10.0.0.2  (option)\n",
       "master_addr = 10.0.0.1  (option ips)\n", "master_port = 2222  (default: several nodes)\n",
       "worker_form = none  (default)\n", "start_method = spawn  (default)\n", "timeout_s = 7.5  (option)\n",
       "environment = TOKEN  (option)\n"}));
  EXPECT_EQ(printed.find("secret"), std::string::npos);
}

TEST(LaunchSpecText, SaysWhereTheInterfaceComesFrom) {
  const auto node_info = cpu_node(2, {{"ACCELMGR_LAUNCH_INTERFACE", "eth1"}});
  EXPECT_TRUE(
      says(text(resolve({.nprocs = 2, .interface = "eth0"}, node_info)), {"interface = eth0  (option)\n"}));
  EXPECT_TRUE(says(text(resolve({.nprocs = 2}, node_info)),
                   {"interface = eth1  (environment ACCELMGR_LAUNCH_INTERFACE)\n"}));
  EXPECT_EQ(
      child_environment(resolve({.nprocs = 2}, node_info), 1, node_info).at("ACCELMGR_LAUNCH_INTERFACE"),
      "eth1");
}

TEST(LaunchSpecText, SaysTheWorkersOfBothForms) {
  EXPECT_TRUE(says(text(resolve({.nprocs = 2, .workers = "a:0;10.0.0.1:7"}, cpu_node(2))),
                   {"workers = a:0;grpc://10.0.0.1:7|a:1;grpc://10.0.0.1:8  (option workers)\n"}));
  EXPECT_TRUE(says(text(resolve({.nprocs = 2}, cpu_node(2, {{"ACCELMGR_TPU_CONFIG", "t;0;h:1"}}))),
                   {"workers = t;0;h:1  (environment ACCELMGR_TPU_CONFIG)\n"}));
}

}  // namespace
}  // namespace accelmgr::launch
