// Tests that a launch with impossible values, devices or backends is refused. The error names the values that
// do not fit together, and the option that is wrong.
#include <limits>

#include "launcher/launch/bad_launch.hpp"

namespace accelmgr::launch {
namespace {

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

}  // namespace
}  // namespace accelmgr::launch
