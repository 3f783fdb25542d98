// Ranks on several nodes: shm within each node, TCP between one leader of each.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/unique_fd.hpp"
#include "launcher/collective/rendezvous/store.hpp"

namespace accelmgr::collective {

/// Identifies a node: boot, pid namespace and network namespace. Two processes have the same key exactly if
/// they can share memory and open each other's /proc.
std::string node_key();

/// Returns the ranks of each node, by their keys. Nodes are in the order of their lowest ranks.
std::vector<std::vector<int>> nodes_of(const std::vector<std::string>& keys);

struct Membership {
  int rank = 0;
  int size = 1;
  std::string backend =
      "auto";  ///< "shm": refused when the ranks are on several nodes; "gloo"; "auto": depends on nodes.
  double timeout_s = 300;
  std::string interface;          ///< Network interface ("eth0"); empty: see local_address().
  std::string node = node_key();  ///< Ranks with the same key are on the same node.
};

/// Makes the communicator of a world whose ranks share nothing but a store. Blocks until all ranks have
/// called it. Throws UsageError when the rank is out of range; ConfigError when the backend is unknown or
/// cannot serve these nodes; CollectiveError{timeout}, which names the missing ranks. The store must outlive
/// the communicator: groups across nodes use it to find each other.
std::shared_ptr<Communicator> rendezvous(Store& store, const std::string& name, const Membership& membership);

}  // namespace accelmgr::collective
