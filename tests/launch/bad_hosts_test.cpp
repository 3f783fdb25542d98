// Tests that a launch over impossible hosts is refused, with the reason.
#include <limits>

#include "launch/bad_launch.hpp"

namespace accelmgr::launch {
namespace {

using Case = BadLaunchCase;

constexpr const char* two_workers = "a:0;10.0.0.1:5000|a:1;10.0.0.2:5000";

class BadHosts : public ::testing::TestWithParam<Case> {};

TEST_P(BadHosts, AreRefusedWithWhatWasWrong) { expect_refusal(GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    Hosts, BadHosts,
    ::testing::Values(Case{"ThisHostIsNotAmongThem",
                           cpu_host(2),
                           [](Options& o) { o.ips = "10.0.0.7,10.0.0.8"; },
                           "ips",
                           {"10.0.0.7, 10.0.0.8", "node1.cluster", "127.0.0.1, 10.0.0.1", "node_rank"}},
                      Case{"ThisHostIsThereTwice",
                           cpu_host(2),
                           [](Options& o) { o.ips = "10.0.0.1,127.0.0.1"; },
                           "ips",
                           {"more than one", "10.0.0.1, 127.0.0.1"}},
                      Case{"EmptyAddress",
                           cpu_host(2),
                           [](Options& o) { o.ips = "10.0.0.1,"; },
                           "ips",
                           {"'10.0.0.1,'", "empty address"}},
                      Case{"TooManyHosts",
                           cpu_host(2),
                           [](Options& o) { o.nnodes = 65537; },
                           "nnodes",
                           {"nnodes is 65537", "65536"}},
                      Case{"OffsetBeyondAnyWorld",
                           cpu_host(2),
                           [](Options& o) {
                             o.nprocs = 2;
                             o.rank_offset = std::numeric_limits<int>::max();
                           },
                           "rank_offset",
                           {"2147483647", "world_size, which is 2"}},
                      Case{"HostsThatMeetNowhere",
                           cpu_host(2),
                           [](Options& o) { o.nnodes = 2; },
                           "nnodes",
                           {"2 hosts", "option nnodes", "ips, workers, or master_addr"}},
                      Case{"WorldOfHostsThatMeetNowhere",
                           cpu_host(2),
                           [](Options& o) {
                             o.nprocs = 2;
                             o.world_size = 6;
                           },
                           "nnodes",
                           {"3 hosts", "ips, workers, or master_addr"}},
                      Case{"NodeRankBeyondTheHosts",
                           cpu_host(2),
                           [](Options& o) {
                             o.ips = "10.0.0.1,10.0.0.2";
                             o.node_rank = 2;
                           },
                           "node_rank",
                           {"node_rank is 2", "2 hosts", "from 0"}},
                      Case{"OtherNumberOfHostsThanAddresses",
                           cpu_host(2),
                           [](Options& o) {
                             o.ips = "10.0.0.1,10.0.0.2";
                             o.nnodes = 3;
                           },
                           "ips",
                           {"3 according to option nnodes", "2 according to option ips"}},
                      Case{"WorldThatIsNoMultiple",
                           cpu_host(2),
                           [](Options& o) {
                             o.nprocs = 2;
                             o.world_size = 5;
                           },
                           "world_size",
                           {"world_size is 5", "nprocs, which is 2", "nnodes and node_rank"}},
                      Case{"WorldThatDoesNotMatchTheAddresses",
                           cpu_host(2),
                           [](Options& o) {
                             o.nprocs = 2;
                             o.ips = "10.0.0.1,10.0.0.2";
                             o.world_size = 6;
                           },
                           "world_size",
                           {"world_size is 6", "2 hosts", "make 4"}},
                      Case{"WorldTooSmallForItsHosts",
                           cpu_host(2),
                           [](Options& o) {
                             o.nprocs = 2;
                             o.nnodes = 3;
                             o.node_rank = 0;
                             o.master_addr = "10.0.0.1";
                             o.world_size = 3;
                           },
                           "world_size",
                           {"world_size is 3", "3 hosts"}},
                      Case{"UnevenHostsWithoutAnOffset",
                           cpu_host(2),
                           [](Options& o) {
                             o.nprocs = 2;
                             o.nnodes = 2;
                             o.node_rank = 1;
                             o.master_addr = "10.0.0.1";
                             o.world_size = 5;
                           },
                           "world_size",
                           {"world_size is 5", "make 4"}},
                      Case{"RanksBeyondTheWorld",
                           cpu_host(2),
                           [](Options& o) {
                             o.nprocs = 2;
                             o.rank_offset = 1;
                           },
                           "rank_offset",
                           {"rank_offset is 1", "nprocs 2", "world_size, which is 2"}},
                      Case{"OffsetOfAnotherHost",
                           cpu_host(2),
                           [](Options& o) {
                             o.nprocs = 2;
                             o.ips = "10.0.0.1,10.0.0.2";
                             o.rank_offset = 2;
                           },
                           "rank_offset",
                           {"rank_offset is 2", "host 0", "begin at 0"}},
                      Case{"OffsetWithinAHost",
                           cpu_host(2),
                           [](Options& o) {
                             o.nprocs = 2;
                             o.nnodes = 2;
                             o.master_addr = "10.0.0.1";
                             o.rank_offset = 1;
                           },
                           "node_rank",
                           {"rank_offset is 1", "nprocs, which is 2", "set node_rank"}}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Workers, BadHosts,
    ::testing::Values(
        Case{"Syntax",
             cpu_host(2),
             [](Options& o) { o.workers = "a:0;10.0.0.1:5000|b"; },
             "workers",
             {"Bad worker syntax: b"}},
        Case{"SyntaxInTheEnvironment",
             cpu_host(2, {{"ACCELMGR_WORKERS", "b"}}),
             nothing,
             "workers",
             {"environment ACCELMGR_WORKERS", "Bad worker syntax: b"}},
        Case{"WorkerFormInTheTpuConfiguration",
             cpu_host(2, {{"ACCELMGR_TPU_CONFIG", "a:0;h:1"}}),
             nothing,
             "workers",
             {"environment ACCELMGR_TPU_CONFIG", "Bad worker syntax: a:0;h:1"}},
        Case{"UnknownNumberOfDevices",
             cpu_host(2),
             [](Options& o) { o.workers = "a:0;10.0.0.1:5000"; },
             "nprocs",
             {"option workers", "how many devices", "nprocs", "ACCELMGR_GPU_NUM_DEVICES"}},
        Case{"WorkerFormByNameAlone",
             cpu_host(2, {{"ACCELMGR_LOCAL_WORKER", "a:0"}}),
             nothing,
             "nprocs",
             {"environment ACCELMGR_LOCAL_WORKER", "how many devices"}},
        Case{"NumberOfDevicesThatIsNone",
             gpu_host(2, {{"ACCELMGR_GPU_NUM_DEVICES", "two"}}),
             nothing,
             "nprocs",
             {"ACCELMGR_GPU_NUM_DEVICES is 'two'"}},
        Case{"MoreProcessesThanDevices",
             gpu_host(4, {{"ACCELMGR_GPU_NUM_DEVICES", "2"}}),
             [](Options& o) { o.nprocs = 3; },
             "nprocs",
             {"nprocs is 3", "2 devices", "ACCELMGR_GPU_NUM_DEVICES"}},
        Case{"OtherWorldThanWorkers",
             cpu_host(2, {{"ACCELMGR_WORLD_SIZE", "3"}}),
             [](Options& o) {
               o.workers = two_workers;
               o.nprocs = 1;
             },
             "workers",
             {"3 according to environment ACCELMGR_WORLD_SIZE", "2 according to option workers"}},
        Case{"WorldSizeThatDoesNotMatchTheWorkers",
             cpu_host(2),
             [](Options& o) {
               o.workers = two_workers;
               o.nprocs = 2;
               o.world_size = 3;
             },
             "world_size",
             {"world_size is 3", "2 hosts (option workers)", "make 4"}},
        Case{"HostsWithoutWorkers",
             gpu_host(2, {{"ACCELMGR_WORLD_SIZE", "2"}, {"ACCELMGR_GPU_NUM_DEVICES", "2"}}),
             nothing,
             "workers",
             {"2 hosts (environment ACCELMGR_WORLD_SIZE)", "ACCELMGR_WORKERS", "more than one host"}},
        Case{"WorldSizeThatIsNoNumber",
             gpu_host(2, {{"ACCELMGR_WORLD_SIZE", "all"}, {"ACCELMGR_GPU_NUM_DEVICES", "2"}}),
             nothing,
             "nnodes",
             {"ACCELMGR_WORLD_SIZE is 'all'", "number of hosts"}},
        Case{"LocalWorkerOutsideOfThem",
             cpu_host(2, {{"ACCELMGR_LOCAL_WORKER", "a:2"}}),
             [](Options& o) {
               o.workers = two_workers;
               o.nprocs = 1;
             },
             "workers",
             {"ACCELMGR_LOCAL_WORKER is 'a:2'", "a:0;", "a:1;"}},
        Case{"LocalWorkerOfBadSyntax",
             cpu_host(2, {{"ACCELMGR_LOCAL_WORKER", "a-2"}}),
             [](Options& o) {
               o.workers = two_workers;
               o.nprocs = 1;
             },
             "workers",
             {"Bad worker syntax: a-2"}},
        Case{"LocalTpuWorkerOfBadSyntaxBesideANodeRank",
             cpu_host(8, {{"ACCELMGR_LOCAL_WORKER", "a-2"}, {"ACCELMGR_TPU_NUM_DEVICES", "2"}}),
             [](Options& o) { o.node_rank = 0; },
             "workers",
             {"Bad worker syntax: a-2"}},
        Case{"NoTpu",
             cpu_host(8, {{"ACCELMGR_TPU_CONFIG", "t;0;h:1"}, {"ACCELMGR_TPU_NUM_DEVICES", "0"}}),
             nothing,
             "nprocs",
             {"ACCELMGR_TPU_NUM_DEVICES is '0'", "from 1 to 4096"}},
        Case{"MoreProcessesThanTheTpuFormHas",
             cpu_host(16, {{"ACCELMGR_TPU_CONFIG", "t;0;h:1"}}),
             [](Options& o) { o.nprocs = 9; },
             "nprocs",
             {"nprocs is 9", "8 devices", "default: the TPU form"}},
        Case{"ThisHostIsNoWorker",
             cpu_host(2),
             [](Options& o) {
               o.workers = "a:0;10.0.0.7:5000|a:1;10.0.0.8:5000";
               o.nprocs = 1;
             },
             "workers",
             {"none of workers (10.0.0.7, 10.0.0.8)", "node1.cluster"}},
        Case{"PortsBeyondTheHighest",
             cpu_host(2),
             [](Options& o) {
               o.workers = "a:0;10.0.0.1:65535";
               o.nprocs = 2;
             },
             "workers",
             {"10.0.0.1:65535", "2 processes", "65536"}},
        Case{"TpuWithoutAName",
             cpu_host(2, {{"ACCELMGR_TPU_NUM_DEVICES", "4"}}),
             nothing,
             "workers",
             {"ACCELMGR_TPU_NUM_DEVICES", "ACCELMGR_TPU_CONFIG or ACCELMGR_LOCAL_WORKER"}},
        Case{"BadServiceAddress",
             gpu_host(2, {{"ACCELMGR_GPU_NUM_DEVICES", "2"}, {"ACCELMGR_SERVICE_ADDRESS", "here"}}),
             nothing,
             "workers",
             {"environment ACCELMGR_SERVICE_ADDRESS", "'here' is not HOST:PORT"}}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace accelmgr::launch
