// Ports are bound before any process is told their numbers, and the listening sockets are passed to the
// processes that use them. No other program can take a port in between.
#pragma once

#include <utility>
#include <vector>

#include "base/unique_fd.hpp"
#include "launcher/launch/plan/launch_spec.hpp"

namespace accelmgr::launch {

struct BoundPort {
  base::UniqueFd
      socket;  ///< It listens on all addresses, IPv6 and IPv4 where the node has both; close-on-exec.
  int port = 0;
};

/// first = 0 binds any free port, otherwise the first free one from `first` on. Throws UsageError for a
/// number that is not a port, and SystemError, which names the ports that were tried.
BoundPort bind_port(int first = 0);

/// Sockets for the processes of one node, where no addresses of workers are configured.
struct WorkerPorts {
  std::vector<BoundPort> workers;  ///< By local index; empty if the launch spec needs none.
  BoundPort service;               ///< Without a socket if the launch spec needs none.

  /// The sockets to pass to a process: pairs of the descriptor here and its number there (variables.hpp).
  std::vector<std::pair<int, int>> descriptors(int local_index) const;
};

/// Binds the ports that the launch spec needs and writes their addresses into it. Does nothing for a launch
/// spec of several nodes or without worker form.
WorkerPorts bind_worker_ports(LaunchSpec& spec, const NodeInfo& node_info);

}  // namespace accelmgr::launch
