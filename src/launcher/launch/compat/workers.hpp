// Worker strings: the nodes of a launch and, once expanded, the address of each process.
//
//   worker form   name:ordinal;[grpc://]host:port|...   one entry a node; its processes at port, port+1, ...
//   TPU form      name;ordinal;host:port|...            one entry a node
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ipc/host_port.hpp"

namespace accelmgr::launch {

enum class WorkerForm { none, worker, tpu };

struct Worker {
  std::string name;
  int ordinal = 0;
  ipc::HostPort address;

  bool operator==(const Worker&) const = default;
};

inline constexpr const char* local_worker_name = "localservice";
inline constexpr int tpu_devices = 8;  ///< Devices of a node in the TPU form, unless configured.

struct WorkerList {
  WorkerForm form = WorkerForm::none;
  std::vector<Worker> nodes;

  bool operator==(const WorkerList&) const = default;
};

/// What torch_xla is told of a launch.
struct XlaLaunch {
  WorkerForm form = WorkerForm::none;
  std::vector<Worker> nodes;    ///< As configured; empty on one node without configured workers.
  std::vector<Worker> workers;  ///< All processes of all nodes, by rank; may be empty.
  std::string local_worker;     ///< TPU form: name:ordinal of this node.
  int devices = 0;              ///< Devices of each node, from the environment. 0: not set there.
  std::string service_address;  ///< HOST:PORT; may be empty.
  bool workers_bound = false;   ///< `workers` are ports that this process has bound (ports.hpp).
  bool service_bound = false;   ///< `service_address` is a port that this process has bound.
};

/// Parses either form; the first entry determines it, and all entries must have it. Throws ConfigError for
/// bad syntax ("Bad worker syntax: <the part>", and "Bad worker HOST:PORT format: <it>" if only the address
/// is wrong) and for a name and ordinal that occur twice.
WorkerList parse_workers(std::string_view text);
/// As above, but accepts only `form`.
std::vector<Worker> parse_workers(std::string_view text, WorkerForm form);

/// Parses "name:ordinal"; leaves the address empty. Throws as above.
Worker parse_local_worker(std::string_view text);

/// The text that parse_workers() reads. The worker form is written with grpc://.
std::string text(std::span<const Worker> workers, WorkerForm form);

/// One entry per process: process i of node h has ordinal h * devices + i and port + i. Throws ConfigError
/// for ports beyond 65535 and for two processes with the same address.
std::vector<Worker> expand_workers(std::span<const Worker> nodes, int devices);

/// One entry for each process of one node, in the order of the bound `ports`.
std::vector<Worker> local_workers(const std::string& hostname, std::span<const int> ports);

/// Names every device of every node: "GPU:1;/job:localservice/replica:0/task:1/device:XLA_GPU:0|...". Each
/// process sees only its own device, so every device is number 0 of its task. `label` is "GPU" or "CPU".
std::string device_map(std::span<const Worker> processes, std::string_view label);

}  // namespace accelmgr::launch
