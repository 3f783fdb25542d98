// Tests of the environment of each launched process: a table for each kind of launch, with a row for each
// variable. ranks_test.cpp has those of ranks and sizes.
#include "launcher/launch/plan/child_environment.hpp"

#include <optional>
#include <ostream>

#include "launcher/launch/nodes.hpp"
#include "launcher/launch/run/ports.hpp"

namespace accelmgr::launch {
namespace {

using Text = std::optional<std::string>;
constexpr std::nullopt_t absent = std::nullopt;

struct Row {
  std::string variable;
  std::vector<Text> values;  ///< One value for each local rank.
};

struct Launch {
  std::string name;
  NodeInfo node_info;
  Options options;
  std::vector<Row> rows;
};

void PrintTo(const Launch& launch, std::ostream* out) { *out << launch.name; }

// Does what bind_worker_ports() does, with fixed ports that a table can name.
void tell_ports(LaunchSpec& spec) {
  spec.xla.workers = local_workers("node1", std::vector<int>{4001, 4002});
  spec.endpoints = {"node1:4001", "node1:4002"};
  spec.xla.workers_bound = true;
  spec.xla.service_address = "node1:4000";
  spec.xla.service_bound = true;
}

Text value_in(const Environment& environment, const std::string& variable) {
  const auto found = environment.find(variable);
  return found == environment.end() ? Text() : found->second;
}

class ChildEnvironment : public ::testing::TestWithParam<Launch> {};

TEST_P(ChildEnvironment, HasEveryVariableOfTheTable) {
  const auto& launch = GetParam();
  auto spec = resolve(launch.options, launch.node_info);
  if (spec.xla.form == WorkerForm::worker && spec.xla.nodes.empty()) tell_ports(spec);
  for (int i = 0; i < spec.nprocs; ++i) {
    const auto child = child_environment(spec, i, launch.node_info);
    for (const auto& row : launch.rows) {
      ASSERT_EQ(row.values.size(), static_cast<std::size_t>(spec.nprocs)) << row.variable;
      EXPECT_EQ(value_in(child, row.variable), row.values[static_cast<std::size_t>(i)])
          << row.variable << " of process " << i;
    }
  }
}

std::vector<Text> both(const Text& value) { return {value, value}; }

const Environment inherited = {{"HOME", "/root"},
                               {"http_proxy", "http://proxy"},
                               {"https_proxy", "http://proxy"},
                               {"RANK", "7"},
                               {"MASTER_PORT", "7"},
                               {"ACCELMGR_WORLD_MEMORY", "/proc/7/fd/7"},
                               {"ACCELMGR_SELECTED_GPUS", "7"},
                               {"FLAGS_selected_gpus", "7"},
                               {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                               {"TORCHELASTIC_ERROR_FILE", "/tmp/error"}};

Environment with(const Environment& more) {
  auto all = inherited;
  all.insert(more.begin(), more.end());
  return all;
}

const Launch one_cpu_node = {"OneCpuNode",
                             cpu_node(8, inherited),
                             {.nprocs = 2, .environment = {{"EXTRA", "1"}, {"HOME", "/else"}}},
                             {{"MASTER_ADDR", both("127.0.0.1")},
                              {"MASTER_PORT", both(absent)},
                              {"ACCELMGR_LAUNCH_BACKEND", both("shm")},
                              {"ACCELMGR_LAUNCH_TIMEOUT", both("300")},
                              {"ACCELMGR_LAUNCH_INTERFACE", both(absent)},
                              {"ACCELMGR_WORLD_MEMORY", both(absent)},
                              {"ACCELMGR_MP_DEVICE", {"CPU:0", "CPU:1"}},
                              {"ACCELMGR_CURRENT_ENDPOINT", both(absent)},
                              {"ACCELMGR_TRAINER_ENDPOINTS", both(absent)},
                              {"ACCELMGR_SELECTED_GPUS", both(absent)},
                              {"FLAGS_selected_gpus", both(absent)},
                              {"CUDA_VISIBLE_DEVICES", both(absent)},
                              {"TORCHELASTIC_USE_AGENT_STORE", both(absent)},
                              {"TORCHELASTIC_ERROR_FILE", both(absent)},
                              {"OMP_NUM_THREADS", both("4")},
                              {"http_proxy", both(absent)},
                              {"https_proxy", both(absent)},
                              {"EXTRA", both("1")},
                              {"HOME", both("/else")}}};

const Launch second_of_two_cpu_nodes = {
    "SecondOfTwoCpuNodes",
    second(cpu_node(1, with({{"OMP_NUM_THREADS", "3"}}))),
    {.nprocs = 2, .ips = "10.0.0.1,10.0.0.2", .master_port = 29500},
    {{"MASTER_ADDR", both("10.0.0.1")},
     {"MASTER_PORT", both("29500")},
     {"ACCELMGR_LAUNCH_BACKEND", both("gloo")},
     {"ACCELMGR_MP_DEVICE", {"CPU:2", "CPU:3"}},
     {"ACCELMGR_CURRENT_ENDPOINT", {"10.0.0.2:29500", "10.0.0.2:29501"}},
     {"ACCELMGR_TRAINER_ENDPOINTS", both("10.0.0.1:29500,10.0.0.1:29501,10.0.0.2:29500,10.0.0.2:29501")},
     {"OMP_NUM_THREADS", both("3")},
     {"HOME", both("/root")}}};

const Launch one_gpu_node = {"OneGpuNode",
                             gpu_node(4, with({{"CUDA_VISIBLE_DEVICES", "3,1,2"}})),
                             {.nprocs = 2},
                             {{"CUDA_VISIBLE_DEVICES", both("3,1")},
                              {"ACCELMGR_SELECTED_GPUS", {"3", "1"}},
                              {"FLAGS_selected_gpus", {"0", "1"}},
                              {"ACCELMGR_MP_DEVICE", {"GPU:0", "GPU:1"}},
                              {"ACCELMGR_LAUNCH_BACKEND", both("nccl")},
                              {"XPU_VISIBLE_DEVICES", both(absent)}}};

const Launch selected_gpus = {"SelectedGpus",
                              gpu_node(8, inherited),
                              {.nprocs = 2, .gpus = "5,4"},
                              {{"CUDA_VISIBLE_DEVICES", both("5,4")},
                               {"ACCELMGR_SELECTED_GPUS", {"5", "4"}},
                               {"FLAGS_selected_gpus", {"0", "1"}}}};

const Launch shared_gpu = {"SharedGpu",
                           gpu_node(1, inherited),
                           {.nprocs = 2, .oversubscribe = true},
                           {{"CUDA_VISIBLE_DEVICES", both("0")},
                            {"FLAGS_selected_gpus", both("0")},
                            {"ACCELMGR_MP_DEVICE", {"GPU:0", "GPU:1"}}}};

const Launch cpus_beside_gpus = {"CpusBesideGpus",
                                 gpu_node(1, with({{"CUDA_VISIBLE_DEVICES", "0"}})),
                                 {.nprocs = 2, .backend = "shm"},
                                 {{"CUDA_VISIBLE_DEVICES", both("0")},
                                  {"ACCELMGR_SELECTED_GPUS", both(absent)},
                                  {"ACCELMGR_MP_DEVICE", {"CPU:0", "CPU:1"}}}};

const Launch worker_form_on_one_node = {
    "WorkerFormOnOneNode",
    gpu_node(2, with({{"ACCELMGR_GPU_NUM_DEVICES", "2"}})),
    {},
    {{"ACCELMGR_MP_DEVICE", {"GPU:0", "GPU:1"}},
     {"CUDA_VISIBLE_DEVICES", {"0", "1"}},
     {"ACCELMGR_SELECTED_GPUS", {"0", "1"}},
     {"FLAGS_selected_gpus", both("0")},
     {"ACCELMGR_LOCAL_WORKER", {"localservice:0", "localservice:1"}},
     {"ACCELMGR_WORKERS", both("localservice:0;grpc://node1:4001|localservice:1;grpc://node1:4002")},
     {"ACCELMGR_DEVICE_MAP", both("GPU:0;/job:localservice/replica:0/task:0/device:XLA_GPU:0|"
                                  "GPU:1;/job:localservice/replica:0/task:1/device:XLA_GPU:0")},
     {"ACCELMGR_SERVICE_ADDRESS", both("node1:4000")},
     {"ACCELMGR_WORKER_SOCKET", both("50")},
     {"ACCELMGR_SERVICE_SOCKET", {"51", absent}},
     {"ACCELMGR_CURRENT_ENDPOINT", {"node1:4001", "node1:4002"}},
     {"ACCELMGR_TRAINER_ENDPOINTS", both("node1:4001,node1:4002")},
     {"ACCELMGR_GPU_NUM_DEVICES", both(absent)}}};

constexpr const char* gpu_map =
    "GPU:0;/job:localservice/replica:0/task:0/device:XLA_GPU:0|GPU:1;/job:localservice/replica:0/task:1/"
    "device:XLA_GPU:0|"
    "GPU:2;/job:localservice/replica:0/task:2/device:XLA_GPU:0|GPU:3;/job:localservice/replica:0/task:3/"
    "device:XLA_GPU:0";
constexpr const char* expanded =
    "c:0;grpc://10.0.0.1:5000|c:1;grpc://10.0.0.1:5001|c:2;grpc://10.0.0.2:6000|c:3;grpc://10.0.0.2:6001";

const Launch worker_form_on_two_nodes = {
    "WorkerFormOnTwoNodes",
    second(gpu_node(2, with({{"ACCELMGR_GPU_NUM_DEVICES", "2"},
                             {"ACCELMGR_WORLD_SIZE", "2"},
                             {"ACCELMGR_LOCAL_WORKER", "c:1"},
                             {"ACCELMGR_WORKERS", "c:0;10.0.0.1:5000|c:1;grpc://10.0.0.2:6000"}}))),
    {},
    {{"ACCELMGR_MP_DEVICE", {"GPU:2", "GPU:3"}},
     {"CUDA_VISIBLE_DEVICES", {"0", "1"}},
     {"ACCELMGR_LOCAL_WORKER", {"localservice:2", "localservice:3"}},
     {"ACCELMGR_WORKERS", both(expanded)},
     {"ACCELMGR_DEVICE_MAP", both(gpu_map)},
     {"ACCELMGR_SERVICE_ADDRESS", both("10.0.0.1:2222")},
     {"ACCELMGR_WORKER_SOCKET", both(absent)},
     {"ACCELMGR_SERVICE_SOCKET", both(absent)},
     {"ACCELMGR_CURRENT_ENDPOINT", {"10.0.0.2:6000", "10.0.0.2:6001"}},
     {"MASTER_ADDR", both("10.0.0.1")},
     {"MASTER_PORT", both("2222")},
     {"ACCELMGR_GPU_NUM_DEVICES", both(absent)}}};

const Launch worker_form_on_cpus = {
    "WorkerFormOnCpus",
    second(cpu_node(4, with({{"ACCELMGR_SERVICE_ADDRESS", "10.0.0.1:7000"}}))),
    {.nprocs = 2, .workers = "c:0;10.0.0.1:5000|c:1;10.0.0.2:6000"},
    {{"ACCELMGR_MP_DEVICE", {"CPU:2", "CPU:3"}},
     {"ACCELMGR_LOCAL_WORKER", {"localservice:2", "localservice:3"}},
     {"ACCELMGR_WORKERS", both(expanded)},
     {"ACCELMGR_DEVICE_MAP", both("CPU:0;/job:localservice/replica:0/task:0/device:XLA_CPU:0|"
                                  "CPU:1;/job:localservice/replica:0/task:1/device:XLA_CPU:0|"
                                  "CPU:2;/job:localservice/replica:0/task:2/device:XLA_CPU:0|"
                                  "CPU:3;/job:localservice/replica:0/task:3/device:XLA_CPU:0")},
     {"ACCELMGR_SERVICE_ADDRESS", both("10.0.0.1:7000")},
     {"ACCELMGR_LAUNCH_BACKEND", both("gloo")}}};

const Launch one_worker = {
    "OneProcessOfTheWorkerForm",
    cpu_node(4, inherited),
    {.nprocs = 1, .workers = "c:0;10.0.0.1:5000"},
    {{"ACCELMGR_WORKERS", {"c:0;grpc://10.0.0.1:5000"}}, {"ACCELMGR_SERVICE_ADDRESS", {absent}}}};

const Launch tpu_form = {"TpuForm",
                         cpu_node(8, with({{"ACCELMGR_TPU_CONFIG", "tpu_worker;0;10.0.0.1:8470"},
                                           {"ACCELMGR_TPU_NUM_DEVICES", "2"}})),
                         {},
                         {{"ACCELMGR_MP_DEVICE", {"TPU:0", "TPU:1"}},
                          {"ACCELMGR_LOCAL_WORKER", both("tpu_worker:0")},
                          {"ACCELMGR_TPU_CONFIG", {"tpu_worker;0;10.0.0.1:8470", absent}},
                          {"ACCELMGR_TPU_NUM_DEVICES", {"2", absent}},
                          {"ACCELMGR_WORKERS", both(absent)},
                          {"ACCELMGR_DEVICE_MAP", both(absent)},
                          {"CUDA_VISIBLE_DEVICES", both(absent)}}};

const Launch tpu_form_on_two_nodes = {"TpuFormOnTwoNodes",
                                      second(cpu_node(8, with({{"ACCELMGR_LOCAL_WORKER", "t:1"}}))),
                                      {.nprocs = 2, .workers = "t;0;10.0.0.1:8470|t;1;10.0.0.2:8470"},
                                      {{"ACCELMGR_MP_DEVICE", {"TPU:2", "TPU:3"}},
                                       {"ACCELMGR_LOCAL_WORKER", both("t:1")},
                                       {"ACCELMGR_SERVICE_ADDRESS", both("10.0.0.1:2222")},
                                       {"ACCELMGR_TPU_CONFIG", both(absent)},
                                       {"ACCELMGR_TPU_NUM_DEVICES", both(absent)}}};

// A launch inside a launch: variables that gave this process its own place are not passed on to its children.
const Launch within_a_launch = {"WithinALaunch",
                                cpu_node(8, with({{"ACCELMGR_ORDINAL", "3"},
                                                  {"ACCELMGR_WORLD_SIZE", "4"},
                                                  {"ACCELMGR_LOCAL_WORKER", "c:3"},
                                                  {"ACCELMGR_WORKERS", expanded},
                                                  {"ACCELMGR_DEVICE_MAP", gpu_map},
                                                  {"ACCELMGR_SERVICE_ADDRESS", "10.0.0.1:2222"}})),
                                {.nprocs = 2},
                                {{"RANK", {"0", "1"}},
                                 {"ACCELMGR_ORDINAL", {"0", "1"}},
                                 {"ACCELMGR_WORLD_SIZE", both("2")},
                                 {"ACCELMGR_LOCAL_WORKER", both(absent)},
                                 {"ACCELMGR_WORKERS", both(absent)},
                                 {"ACCELMGR_DEVICE_MAP", both(absent)},
                                 {"ACCELMGR_SERVICE_ADDRESS", both(absent)}}};

INSTANTIATE_TEST_SUITE_P(Launch, ChildEnvironment,
                         ::testing::Values(one_cpu_node, second_of_two_cpu_nodes, one_gpu_node, selected_gpus,
                                           shared_gpu, cpus_beside_gpus, worker_form_on_one_node,
                                           worker_form_on_two_nodes, worker_form_on_cpus, one_worker,
                                           tpu_form, tpu_form_on_two_nodes, within_a_launch),
                         [](const auto& info) { return info.param.name; });

// They need no address then: on one node MASTER_PORT is not set.
TEST(Ranks, MeetInMemoryWithEveryBackendOfOneNode) {
  EXPECT_TRUE(ranks_meet_in_memory(resolve({.nprocs = 2}, cpu_node(2))));
  const auto on_gpus = resolve({.nprocs = 2}, gpu_node(2));
  EXPECT_EQ(on_gpus.backend, "nccl");
  EXPECT_TRUE(ranks_meet_in_memory(on_gpus));
  EXPECT_FALSE(ranks_meet_in_memory(resolve({.nprocs = 1}, gpu_node(2))));
  EXPECT_FALSE(
      ranks_meet_in_memory(resolve({.nprocs = 2, .ips = "10.0.0.1,10.0.0.2", .node_rank = 0}, gpu_node(2))));
}

TEST(ChildEnvironment, HasAtLeastOneThread) {
  const auto node_info = cpu_node(2);
  EXPECT_EQ(child_environment(resolve({.nprocs = 5}, node_info), 4, node_info).at("OMP_NUM_THREADS"), "1");
}

}  // namespace
}  // namespace accelmgr::launch
