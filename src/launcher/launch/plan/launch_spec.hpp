// A resolved launch: values that the options leave open are filled in, invalid combinations are refused, and
// the source of each value is known.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "accelmgr/launch.hpp"
#include "launcher/launch/compat/workers.hpp"
#include "launcher/launch/plan/node_info.hpp"

namespace accelmgr::launch {

struct LaunchSpec {
  std::string device = "cpu";                ///< The name of a kind in devices.hpp.
  std::string backend;                       ///< serial, shm, gloo, nccl.
  int nprocs = 1;                            ///< Processes on this node.
  std::vector<std::string> visible_devices;  ///< Absolute id for each local process; empty on CPUs.

  int nnodes = 1;
  int node_rank = 0;
  int world_size = 1;
  int rank_offset = 0;           ///< Rank of the first process here.
  std::vector<std::string> ips;  ///< Of all nodes, in the order of their node ranks; may be empty.
  std::string master_addr;
  std::string interface;  ///< Where ranks of several nodes connect; empty: they choose it.
  int master_port = 0;    ///< 0: MASTER_PORT is not set in the processes.

  XlaLaunch xla;
  std::vector<std::string>
      endpoints;  ///< HOST:PORT of all processes, by rank; empty when they are not known.

  StartMethod start_method = StartMethod::spawn;
  bool join = true;
  bool daemon = false;
  bool oversubscribe = false;
  double timeout_s = 300;
  double terminate_timeout_s = 5;
  std::map<std::string, std::string> environment;  ///< Variables that the options add for every process.

  /// The source of each field, by its name: "option", "environment CUDA_VISIBLE_DEVICES", "default: 2 cores".
  std::map<std::string, std::string> sources;
  std::vector<std::string> warnings;  ///< Settings that work but are probably a mistake, a sentence each.

  int rank(int local_index) const { return rank_offset + local_index; }
};

/// Throws ConfigError. Its text names the values that contradict each other and their sources; its key is the
/// option at fault.
LaunchSpec resolve(const Options& options, const NodeInfo& node_info);

/// Whether the ranks find each other in memory of this node (collective/shm), which the launcher makes. They
/// use it with other backends too: no address has to be free then.
bool ranks_meet_in_memory(const LaunchSpec& spec);

/// A line "key = value  (source)" for each field; the option print_config prints this.
std::string text(const LaunchSpec& spec);

}  // namespace accelmgr::launch
