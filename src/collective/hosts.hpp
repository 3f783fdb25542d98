// Ranks on several hosts: shm within each host, gloo between one leader of each.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "accelmgr/communicator.hpp"
#include "base/unique_fd.hpp"
#include "collective/store.hpp"

namespace accelmgr::collective {

/// What two processes have in common exactly if they can share memory and reach each other's /proc: boot,
/// pid namespace, network namespace.
std::string host_key();

struct Membership {
  int rank = 0;
  int size = 1;
  std::string backend =
      "auto";  ///< "shm": refused when the ranks are on several hosts; "gloo"; "auto": by the hosts.
  double timeout_s = 300;
  std::string interface;  ///< As gloo::Options.
};

/// The world of ranks that know nothing of each other but a store. Blocks until all are there. Throws
/// CollectiveError{timeout} which names the missing ranks, ConfigError when the backend cannot serve these
/// hosts. Groups across hosts meet in the store: it must outlive them.
std::shared_ptr<Communicator> rendezvous(Store& store, const std::string& name, const Membership& membership);

}  // namespace accelmgr::collective
