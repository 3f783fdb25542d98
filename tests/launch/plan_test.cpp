// What a launch becomes where the options leave things open, and where each value came from.
#include <ostream>

#include "launch/machines.hpp"

namespace accelmgr::launch {
namespace {

struct Case {
  std::string name;
  Machine machine;
  Options options;
  std::string device, backend;
  int nprocs;
  std::string source_of_nprocs;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

Machine without_nccl(Machine machine) {
  return without("nccl", "this build has no NCCL", std::move(machine));
}

class Defaults : public ::testing::TestWithParam<Case> {};

TEST_P(Defaults, FollowTheDevicesAndTheHosts) {
  const auto& expected = GetParam();
  const auto plan = resolve(expected.options, expected.machine);
  EXPECT_EQ(plan.device, expected.device);
  EXPECT_EQ(plan.backend, expected.backend);
  EXPECT_EQ(plan.nprocs, expected.nprocs);
  EXPECT_EQ(plan.sources.at("nprocs"), expected.source_of_nprocs);
}

INSTANTIATE_TEST_SUITE_P(
    Launch, Defaults,
    ::testing::Values(
        Case{"Cpu", cpu_machine(3), {}, "cpu", "shm", 3, "default: 3 cores"},
        Case{"CpuAndOption", cpu_machine(3), {.nprocs = 2}, "cpu", "shm", 2, "option"},
        Case{"CpuHosts", cpu_machine(3), {.ips = "10.0.0.1,10.0.0.2"}, "cpu", "gloo", 3, "default: 3 cores"},
        Case{"Gpu", gpu_machine(4), {}, "gpu", "nccl", 4, "default: 4 GPUs"},
        Case{"GpuHosts", gpu_machine(4), {.ips = "10.0.0.1,10.0.0.2"}, "gpu", "nccl", 4, "default: 4 GPUs"},
        Case{"VisibleGpus",
             gpu_machine(4, {{"CUDA_VISIBLE_DEVICES", "2,3"}}),
             {},
             "gpu",
             "nccl",
             2,
             "environment CUDA_VISIBLE_DEVICES"},
        Case{"SelectedGpus", gpu_machine(4), {.gpus = "3,1,0"}, "gpu", "nccl", 3, "option gpus"},
        Case{"SelectedGpusOverSharedMemory",
             gpu_machine(4),
             {.backend = "shm", .gpus = "3"},
             "gpu",
             "shm",
             1,
             "option gpus"},
        Case{"HiddenGpus",
             gpu_machine(4, {{"CUDA_VISIBLE_DEVICES", ""}}),
             {},
             "cpu",
             "shm",
             8,
             "default: 8 cores"},
        Case{"CpusBesideGpus", gpu_machine(4), {.backend = "gloo"}, "cpu", "gloo", 8, "default: 8 cores"},
        Case{"Serial",
             cpu_machine(3),
             {.backend = "serial"},
             "cpu",
             "serial",
             1,
             "default: serial is one process"},
        Case{"GpuWithoutNccl", without_nccl(gpu_machine(2)), {}, "gpu", "shm", 2, "default: 2 GPUs"},
        Case{"ConfiguredGpus",
             gpu_machine(4, {{"ACCELMGR_GPU_NUM_DEVICES", "2"}}),
             {},
             "gpu",
             "nccl",
             2,
             "environment ACCELMGR_GPU_NUM_DEVICES"},
        Case{"Tpu",
             cpu_machine(9, {{"ACCELMGR_TPU_CONFIG", "t;0;h:1"}}),
             {},
             "cpu",
             "shm",
             8,
             "default: the TPU form"},
        Case{"ConfiguredTpus",
             cpu_machine(9, {{"ACCELMGR_TPU_NUM_DEVICES", "4"}, {"ACCELMGR_LOCAL_WORKER", "t:0"}}),
             {},
             "cpu",
             "shm",
             4,
             "environment ACCELMGR_TPU_NUM_DEVICES"}),
    [](const auto& info) { return info.param.name; });

TEST(Plan, FindsThisHostAmongTheAddresses) {
  for (const std::string other : {"10.0.0.9", "node9"})
    for (const std::string own : {"10.0.0.1", "node1", "NODE1.cluster", "fd00:0:0:0:0:0:0:1"}) {
      const auto plan = resolve({.nprocs = 2, .ips = other + ", " + own}, cpu_machine(2));
      EXPECT_EQ(plan.node_rank, 1) << own;
      EXPECT_EQ(plan.rank_offset, 2);
      EXPECT_EQ(plan.world_size, 4);
      EXPECT_EQ(plan.master_addr, other);
      EXPECT_EQ(plan.master_port, 2222);
      EXPECT_EQ(plan.sources.at("node_rank"), "option ips");
    }
}

TEST(Plan, TakesOneAddressAsThisHost) {
  const auto plan = resolve({.nprocs = 1, .ips = "192.168.7.7"}, cpu_machine(2));
  EXPECT_EQ(plan.nnodes, 1);
  EXPECT_EQ(plan.master_addr, "192.168.7.7");
}

TEST(Plan, BelievesTheNodeRankOverTheAddresses) {
  const auto plan = resolve({.nprocs = 1, .ips = "a,b,c", .node_rank = 2}, cpu_machine(2));
  EXPECT_EQ(plan.rank(0), 2);
  EXPECT_EQ(plan.sources.at("node_rank"), "option");
}

TEST(Plan, TellsTheHostByItsWorker) {
  const Options options = {.nprocs = 1, .workers = "a:5;10.0.0.2:1|b:9;10.0.0.1:1"};
  const auto by_address = resolve(options, cpu_machine(2));
  EXPECT_EQ(by_address.node_rank, 1);
  EXPECT_EQ(by_address.sources.at("node_rank"), "option workers");
  const auto by_name = resolve(options, cpu_machine(2, {{"ACCELMGR_LOCAL_WORKER", "a:5"}}));
  EXPECT_EQ(by_name.node_rank, 0);
  EXPECT_EQ(by_name.sources.at("node_rank"), "environment ACCELMGR_LOCAL_WORKER");
}

TEST(Plan, AsksOfNoBackendButTheChosenOne) {
  auto machine = cpu_machine(2);
  std::vector<std::string> asked;
  machine.unavailable_because = [&](const std::string& backend) { return asked.push_back(backend), ""; };
  resolve({.nprocs = 2}, machine);
  resolve({.nprocs = 2, .backend = "shm"}, machine);
  resolve({.nprocs = 2, .ips = "10.0.0.1,10.0.0.2"}, machine);
  EXPECT_EQ(asked, std::vector<std::string>{"shm"});
}

TEST(Plan, PrefersTheWorkersOfTheOptions) {
  const auto machine = cpu_machine(2, {{"ACCELMGR_WORKERS", "b:0;10.0.0.1:7"}});
  EXPECT_EQ(resolve({.nprocs = 1}, machine).workers.front().name, "b");
  EXPECT_EQ(resolve({.nprocs = 1, .workers = "a:0;10.0.0.1:7"}, machine).workers.front().name, "a");
}

TEST(Plan, CountsTheHostsOfAWorldBySize) {
  const auto plan =
      resolve({.nprocs = 2, .master_addr = "10.0.0.1", .rank_offset = 4, .world_size = 6}, cpu_machine(2));
  EXPECT_EQ(plan.nnodes, 3);
  EXPECT_EQ(plan.node_rank, 2);
  EXPECT_EQ(plan.rank(1), 5);
}

TEST(Plan, AllowsHostsThatDiffer) {
  const auto plan = resolve({.nprocs = 2,
                             .master_addr = "10.0.0.1",
                             .master_port = 29500,
                             .nnodes = 2,
                             .node_rank = 1,
                             .rank_offset = 3,
                             .world_size = 5},
                            cpu_machine(2));
  EXPECT_EQ(plan.world_size, 5);
  EXPECT_EQ(plan.rank(0), 3);
  EXPECT_TRUE(plan.endpoints.empty());
}

TEST(Plan, DealsGpusInTurnWhereProcessesShareThem) {
  using Ids = std::vector<std::string>;
  EXPECT_EQ(resolve({.nprocs = 5, .oversubscribe = true}, gpu_machine(2)).visible_devices,
            (Ids{"0", "1", "0", "1", "0"}));
  EXPECT_EQ(resolve({.nprocs = 3, .gpus = "3,2", .oversubscribe = true}, gpu_machine(4)).visible_devices,
            (Ids{"3", "2", "3"}));
}

TEST(PlanWarnings, TellOfMoreProcessesThanCores) {
  EXPECT_TRUE(resolve({.nprocs = 2}, cpu_machine(2)).warnings.empty());
  const auto warnings = resolve({.nprocs = 3}, cpu_machine(2)).warnings;
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_TRUE(says(warnings.front(), {"3 processes", "2 cores"}));
  EXPECT_TRUE(resolve({.nprocs = 16, .oversubscribe = true}, gpu_machine(1)).warnings.empty());
}

TEST(PlanWarnings, TellOfGpusWithoutNccl) {
  const auto warnings = resolve({}, without_nccl(gpu_machine(2))).warnings;
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_TRUE(says(warnings.front(), {"no NCCL", "shm"}));
}

TEST(PlanWarnings, TellOfGpusThatABackendOfCpusLeavesIdle) {
  const auto warnings = resolve({.nprocs = 1, .backend = "gloo"}, gpu_machine(2)).warnings;
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_TRUE(says(warnings.front(), {"gloo", "CPUs", "0,1"}));
  EXPECT_TRUE(resolve({.nprocs = 1, .backend = "gloo"}, cpu_machine(2)).warnings.empty());
}

TEST(PlanWarnings, TellOfTpusWithoutADriver) {
  const auto warnings = resolve({.nprocs = 2, .workers = "t;0;h:1"}, cpu_machine(2)).warnings;
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_TRUE(says(warnings.front(), {"TPU", "CPUs"}));
}

TEST(PlanText, SaysEveryValueAndItsSource) {
  Options options = {
      .nprocs = 2, .ips = "10.0.0.1,10.0.0.2", .timeout_s = 7.5, .environment = {{"TOKEN", "secret"}}};
  const auto printed = text(resolve(options, gpu_machine(4, {{"CUDA_VISIBLE_DEVICES", "2,3"}})));
  EXPECT_TRUE(says(
      printed,
      {"device = gpu  (environment CUDA_VISIBLE_DEVICES)\n", "backend = nccl  (default: GPUs)\n",
       "nprocs = 2  (option)\n", "visible_devices = 2,3  (environment CUDA_VISIBLE_DEVICES)\n",
       "nnodes = 2  (option ips)\n", "node_rank = 0  (option ips)\n", "world_size = 4  (nprocs * nnodes)\n",
       "rank_offset = 0  (nprocs * node_rank)\n", "ips = 10.0.0.1,10.0.0.2  (option)\n",
       "master_addr = 10.0.0.1  (option ips)\n", "master_port = 2222  (default: several hosts)\n",
       "worker_form = none  (default)\n", "start_method = spawn  (default)\n", "timeout_s = 7.5  (option)\n",
       "environment = TOKEN  (option)\n"}));
  EXPECT_EQ(printed.find("secret"), std::string::npos);
}

TEST(PlanText, SaysTheWorkersOfBothForms) {
  EXPECT_TRUE(says(text(resolve({.nprocs = 2, .workers = "a:0;10.0.0.1:7"}, cpu_machine(2))),
                   {"workers = a:0;grpc://10.0.0.1:7|a:1;grpc://10.0.0.1:8  (option workers)\n"}));
  EXPECT_TRUE(says(text(resolve({.nprocs = 2}, cpu_machine(2, {{"ACCELMGR_TPU_CONFIG", "t;0;h:1"}}))),
                   {"workers = t;0;h:1  (environment ACCELMGR_TPU_CONFIG)\n"}));
}

}  // namespace
}  // namespace accelmgr::launch
