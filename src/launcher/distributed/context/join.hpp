// Joins the other processes, through the memory of our launcher or through a store.
#pragma once

#include <memory>
#include <string>

#include "accelmgr/communicator.hpp"
#include "base/unique_fd.hpp"
#include "launcher/collective/rendezvous/store.hpp"
#include "launcher/distributed/context/world_environment.hpp"

namespace accelmgr::distributed {

struct JoinRequest {
  Environment environment;
  Place place;
  std::string backend;      ///< Checked already.
  std::string init_method;  ///< Empty: env://.
  double timeout_s = 300;
  base::UniqueFd socket;  ///< Listens at the master's address already; may be empty.
};

/// Whether the ranks meet where the environment says: env:// (or empty).
bool is_by_environment(const std::string& init_method);
/// Throws ConfigError, which quotes it, unless it is env:// (or empty), tcp://HOST:PORT or file:///PATH.
void check_init_method(const std::string& init_method);

struct Joined {
  /// Null without a store. Destroyed after `world`: on rank 0 it may serve the store.
  std::shared_ptr<collective::Store> store;
  std::shared_ptr<Communicator> world;
  Place place;                     ///< Complete.
  std::vector<std::string> nodes;  ///< The node of each rank; empty: all are on this one.
};

/// Through a store it blocks until all ranks are there; through memory it does not wait. Throws as
/// initialize() does.
Joined join(JoinRequest request);

}  // namespace accelmgr::distributed
