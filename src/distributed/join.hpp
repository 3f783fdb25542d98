// Joining the other processes: by the memory our launcher made, or through a store.
#pragma once

#include <memory>
#include <string>

#include "accelmgr/communicator.hpp"
#include "base/unique_fd.hpp"
#include "collective/store.hpp"
#include "distributed/environment.hpp"

namespace accelmgr::distributed {

struct JoinRequest {
  Environment environment;
  Place place;
  std::string backend;      ///< Checked already.
  std::string init_method;  ///< Empty: env://.
  double timeout_s = 300;
  base::UniqueFd socket;  ///< Listens at the master's address already; may be none.
};

/// Throws ConfigError, which names it, for what is neither env:// (or empty) nor tcp://HOST:PORT nor
/// file:///PATH.
void check_init_method(const std::string& init_method);

/// What can be said about a request without asking anybody. Throws ConfigError, which names what is missing
/// (MASTER_ADDR, ...) or what is no init_method.
void check(const JoinRequest& request);

struct Joined {
  /// Destroyed after the communicator: rank 0 may serve it.
  std::shared_ptr<collective::Store> store;
  std::shared_ptr<Communicator> world;
  Place place;                     ///< Complete.
  std::vector<std::string> hosts;  ///< Of each rank; empty: all on this one.
};

/// Blocks until all ranks are there, if they meet through a store; the memory is joined without waiting.
/// Throws as initialize() does.
Joined join(JoinRequest request);

}  // namespace accelmgr::distributed
