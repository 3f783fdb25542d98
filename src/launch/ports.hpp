// Ports that are bound before anybody is told of them, and stay bound until their user has them: nobody else
// can take one in between.
#pragma once

#include <utility>
#include <vector>

#include "base/unique_fd.hpp"
#include "launch/plan.hpp"

namespace accelmgr::launch {

struct BoundPort {
  base::UniqueFd
      socket;  ///< Listening on all addresses, IPv6 and IPv4 where the host has both; close-on-exec.
  int port = 0;
};

/// first 0: any port. Otherwise the first free one from `first` on. Throws SystemError, which names the
/// ports that were tried.
BoundPort bind_port(int first = 0);

/// Sockets of the processes of one host whose workers are not configured.
struct WorkerPorts {
  std::vector<BoundPort> workers;  ///< By local index; empty when the plan needs none.
  BoundPort service;               ///< No socket when the plan needs none.

  /// What the process gets: our descriptor, and the number it has there (variables.hpp).
  std::vector<std::pair<int, int>> descriptors(int local_index) const;
};

/// Binds what the plan needs, and writes the addresses into it. Nothing for a plan without worker form.
WorkerPorts bind_worker_ports(Plan& plan, const Machine& machine);

}  // namespace accelmgr::launch
