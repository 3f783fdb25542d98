// Tests that a launch with impossible values, devices or backends is refused. The error names the values that
// do not fit together, and the option that is wrong.
#include <limits>

#include "launch/bad_launch.hpp"

namespace accelmgr::launch {
namespace {

using Case = BadLaunchCase;

class BadLaunch : public ::testing::TestWithParam<Case> {};

TEST_P(BadLaunch, IsRefusedWithWhatWasWrong) { expect_refusal(GetParam()); }

HostInfo without_gloo() {
  auto host_info = cpu_host(2);
  host_info.unavailable_because = [](const std::string& backend) {
    return backend == "gloo" ? "there is no plug-in" : "";
  };
  return host_info;
}

INSTANTIATE_TEST_SUITE_P(
    Values, BadLaunch,
    ::testing::Values(
        Case{"NoProcess",
             cpu_host(2),
             [](Options& o) { o.nprocs = 0; },
             "nprocs",
             {"nprocs is 0", "from 1", "or -1"}},
        Case{"NegativeProcesses",
             cpu_host(2),
             [](Options& o) { o.nprocs = -2; },
             "nprocs",
             {"nprocs is -2", "from 1"}},
        Case{"TooManyProcesses",
             cpu_host(2),
             [](Options& o) { o.nprocs = 4097; },
             "nprocs",
             {"nprocs is 4097", "4096"}},
        Case{"NegativeHosts", cpu_host(2), [](Options& o) { o.nnodes = -1; }, "nnodes", {"nnodes is -1"}},
        Case{"NegativeNodeRank",
             cpu_host(2),
             [](Options& o) { o.node_rank = -2; },
             "node_rank",
             {"node_rank is -2"}},
        Case{"NegativeOffset",
             cpu_host(2),
             [](Options& o) { o.rank_offset = -1; },
             "rank_offset",
             {"rank_offset is -1"}},
        Case{"NegativeWorld",
             cpu_host(2),
             [](Options& o) { o.world_size = -1; },
             "world_size",
             {"world_size is -1"}},
        Case{"PortBeyondTheHighest",
             cpu_host(2),
             [](Options& o) { o.master_port = 65536; },
             "master_port",
             {"master_port is 65536", "65535"}},
        Case{"NoTime", cpu_host(2), [](Options& o) { o.timeout_s = 0; }, "timeout_s", {"timeout_s is 0"}},
        Case{"UndefinedTime",
             cpu_host(2),
             [](Options& o) { o.timeout_s = std::numeric_limits<double>::quiet_NaN(); },
             "timeout_s",
             {"timeout_s is nan"}},
        Case{"NegativeTimeToEnd",
             cpu_host(2),
             [](Options& o) { o.terminate_timeout_s = -1; },
             "terminate_timeout_s",
             {"terminate_timeout_s is -1"}},
        Case{"VariableWithoutAName",
             cpu_host(2),
             [](Options& o) { o.environment[""] = "x"; },
             "environment",
             {"environment has ''"}},
        Case{"VariableWithAnEqualSign",
             cpu_host(2),
             [](Options& o) { o.environment["A=B"] = "x"; },
             "environment",
             {"environment has 'A=B'"}}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Devices, BadLaunch,
    ::testing::Values(
        Case{"MoreProcessesThanGpus",
             gpu_host(2),
             [](Options& o) { o.nprocs = 3; },
             "nprocs",
             {"nprocs is 3", "2 GPUs", "0,1", "oversubscribe"}},
        Case{"MoreProcessesThanVisibleGpus",
             gpu_host(4, {{"CUDA_VISIBLE_DEVICES", "3,1"}}),
             [](Options& o) { o.nprocs = 3; },
             "nprocs",
             {"nprocs is 3", "2 GPUs", "3,1", "CUDA_VISIBLE_DEVICES"}},
        Case{"FewerGpusThanProcesses",
             gpu_host(4),
             [](Options& o) {
               o.gpus = "0,1";
               o.nprocs = 3;
             },
             "gpus",
             {"'0,1'", "2 devices", "nprocs is 3", "oversubscribe"}},
        Case{"MoreGpusThanProcesses",
             gpu_host(4),
             [](Options& o) {
               o.gpus = "0,1,2";
               o.nprocs = 2;
             },
             "gpus",
             {"'0,1,2'", "3 devices", "nprocs is 2"}},
        Case{"GpuOutsideTheVisibleOnes",
             gpu_host(8, {{"CUDA_VISIBLE_DEVICES", "4,5"}}),
             [](Options& o) { o.gpus = "4,6"; },
             "gpus",
             {"'6'", "(4,5", "CUDA_VISIBLE_DEVICES"}},
        Case{"GpuThatDoesNotExist",
             gpu_host(2),
             [](Options& o) { o.gpus = "2"; },
             "gpus",
             {"'2'", "0,1", "2 GPUs"}},
        Case{"GpuTwice",
             gpu_host(2),
             [](Options& o) { o.gpus = "1,1", o.oversubscribe = true; },
             "gpus",
             {"'1'", "twice"}},
        Case{"EmptyGpu", gpu_host(2), [](Options& o) { o.gpus = "0,,1"; }, "gpus", {"'0,,1'", "GPU ''"}},
        Case{"GpusWithoutAny",
             cpu_host(2),
             [](Options& o) { o.gpus = "0"; },
             "gpus",
             {"gpus is '0'", "this machine has no GPU"}},
        Case{"GpusThatAreHidden",
             gpu_host(2, {{"CUDA_VISIBLE_DEVICES", ""}}),
             [](Options& o) { o.gpus = "0"; },
             "gpus",
             {"none of the 2 GPUs", "CUDA_VISIBLE_DEVICES is ''"}},
        Case{"GpusAndXpus",
             gpu_host(2),
             [](Options& o) {
               o.gpus = "0";
               o.xpus = "0";
             },
             "xpus",
             {"gpus is '0'", "xpus is '0'", "one kind"}},
        Case{"Xpus",
             gpu_host(2),
             [](Options& o) { o.xpus = "0"; },
             "xpus",
             {"xpus is '0'", "no xpu device is present", "cpu and gpu"}},
        Case{"VisibleXpus",
             cpu_host(2, {{"XPU_VISIBLE_DEVICES", "0,1"}}),
             [](Options& o) {
               o.xpus = "0,2";
               o.nprocs = 2;
             },
             "xpus",
             {"xpus is '0,2'", "no xpu device is present", "cpu and gpu"}},
        Case{"XpuBackend",
             gpu_host(2),
             [](Options& o) { o.backend = "bkcl"; },
             "backend",
             {"backend is bkcl", "no xpu device"}},
        Case{"CustomDevices",
             cpu_host(2, {{"ACCELMGR_SELECTED_CUSTOMS", "0,1"}}),
             [](Options& o) { o.backend = "xccl"; },
             "backend",
             {"backend is xccl", "no custom device"}},
        Case{"GpusOfTheEnvironmentWithoutAny",
             cpu_host(2, {{"ACCELMGR_GPU_NUM_DEVICES", "2"}}),
             nothing,
             "backend",
             {"ACCELMGR_GPU_NUM_DEVICES is 2", "no GPU"}}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Backends, BadLaunch,
    ::testing::Values(Case{"Unknown",
                           cpu_host(2),
                           [](Options& o) { o.backend = "glo"; },
                           "backend",
                           {"unknown backend 'glo'", "serial, shm, gloo, auto", "did you mean 'gloo'"}},
                      Case{"UnknownWhereThereAreGpus",
                           gpu_host(1),
                           [](Options& o) { o.backend = "mpi"; },
                           "backend",
                           {"unknown backend 'mpi'", "serial, shm, gloo, nccl, auto"}},
                      Case{"NcclWithoutGpus",
                           cpu_host(2),
                           [](Options& o) { o.backend = "nccl"; },
                           "backend",
                           {"backend is nccl", "this machine has no GPU",
                            "use backend shm on one host, gloo over several"}},
                      Case{"GlooThatIsMissing",
                           without_gloo(),
                           [](Options& o) { o.backend = "gloo"; },
                           "backend",
                           {"gloo cannot be used", "there is no plug-in", "available are serial, shm"}},
                      Case{"UnknownWhereGlooIsMissing",
                           without_gloo(),
                           [](Options& o) { o.backend = "mpi"; },
                           "backend",
                           {"unknown backend 'mpi'", "available are serial, shm, auto"}},
                      Case{"SerialProcesses",
                           cpu_host(2),
                           [](Options& o) {
                             o.backend = "serial";
                             o.nprocs = 2;
                           },
                           "backend",
                           {"serial is for a world of one process", "has 2"}},
                      Case{"SharedMemoryBetweenHosts",
                           cpu_host(2),
                           [](Options& o) {
                             o.backend = "shm";
                             o.ips = "10.0.0.1,10.0.0.2";
                           },
                           "backend",
                           {"shm", "2 hosts", "gloo"}}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace accelmgr::launch
