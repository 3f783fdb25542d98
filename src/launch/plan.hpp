// A launch, resolved: every value that the options leave open is filled in, everything that cannot be is
// refused, and each value knows where it came from.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "accelmgr/launch.hpp"
#include "launch/machine.hpp"
#include "launch/workers.hpp"

namespace accelmgr::launch {

struct Plan {
  std::string device = "cpu";                ///< A kind of devices.hpp.
  std::string backend;                       ///< serial, shm, gloo, nccl.
  int nprocs = 1;                            ///< Of this host.
  std::vector<std::string> visible_devices;  ///< Absolute id for each local process; empty on CPUs.

  int nnodes = 1;
  int node_rank = 0;
  int world_size = 1;
  int rank_offset = 0;           ///< Rank of the first process here.
  std::vector<std::string> ips;  ///< Of all hosts, in the order of their node ranks; may be empty.
  std::string master_addr;
  int master_port = 0;  ///< 0: none is told to the processes.

  WorkerForm worker_form = WorkerForm::none;
  std::vector<Worker> worker_hosts;  ///< As configured; empty on one host without configured workers.
  std::vector<Worker> workers;       ///< Of all processes of all hosts, by rank; may be empty.
  std::vector<std::string>
      endpoints;                ///< HOST:PORT of all processes, by rank; empty when they are not known.
  std::string local_worker;     ///< TPU form: name:ordinal of this host.
  int configured_devices = 0;   ///< Of each host, as the environment says; 0: it does not.
  std::string service_address;  ///< HOST:PORT; may be empty.
  bool workers_bound = false;   ///< `workers` are sockets of this process (ports.hpp), not configured.
  bool service_bound = false;   ///< `service_address` likewise.

  StartMethod start_method = StartMethod::spawn;
  bool join = true;
  bool daemon = false;
  bool oversubscribe = false;
  double timeout_s = 300;
  double terminate_timeout_s = 5;
  std::map<std::string, std::string> environment;  ///< What the options add for every process.

  /// By the names of the fields above: "option", "environment CUDA_VISIBLE_DEVICES", "default: 2 cores", ...
  std::map<std::string, std::string> sources;
  std::vector<std::string> warnings;  ///< What will work but is hardly meant, one sentence each.

  int rank(int local_index) const { return rank_offset + local_index; }
};

/// Throws ConfigError, whose text names the values that do not go together and where they come from; its key
/// is the option at fault.
Plan resolve(const Options& options, const Machine& machine);

/// "key = value  (source)", a line each: what print_config prints.
std::string text(const Plan& plan);

}  // namespace accelmgr::launch
