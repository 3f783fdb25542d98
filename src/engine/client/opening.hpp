// How a host comes to a manager: one that it starts, as a program or as a fork of itself, or a service that
// it finds. What comes back is the same: the link to a manager whose runners are ready. The destructor of a
// link does not end the manager: its owner must call leave() or end().
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/errors.hpp"
#include "engine/client/link.hpp"
#include "engine/protocol/messages.hpp"

namespace accelmgr::client {

/// How a manager process is started: see StartOptions.
struct Origin {
  StartMethod method = StartMethod::spawn;
  std::vector<std::string> command{};
};

/// A manager that was forked did not come to life: another thread of the host held what it needs.
class ForkHangs : public SessionError {
 public:
  using SessionError::SessionError;
};

/// Gets the session. If the host has started the manager, there are no runners yet, and they wait until this
/// returns.
using OnOpening = std::function<void(protocol::Opening)>;

/// Starts a manager that makes a session, and blocks until its runners are ready. Asks
/// base::interrupted() every 20 ms. Throws the error with which the manager failed; ForkHangs; SessionError
/// when that returned true, the manager died, or did not answer in time.
Link start_manager(const Config& config, const Origin& origin, const OnOpening& opening);
/// Starts a manager that takes over the session of the descriptors `session`. Calls `free_session` before
/// that manager looks at the session: no process of an earlier manager may work on it when that returns.
/// reads_again: see protocol::Begin. Blocks and throws as start_manager().
Link start_manager_again(const Config& config, const Origin& origin, const std::vector<int>& session,
                         bool reads_again, const std::function<void()>& free_session);

struct Attaching {
  std::string name{};        ///< How the service names this host. Empty: the name of this program.
  double patience_s = 10.0;  ///< How long to wait while the service starts, or another host is ending.
};
/// Becomes the host that drives the session of the service with the socket at `path`. Blocks for at most
/// `how.patience_s` and a second. Throws SessionError: there is no service, another host drives the session,
/// the service is of another build, or the wait was interrupted.
Link attach(const std::string& path, const Attaching& how, const OnOpening& opening);

}  // namespace accelmgr::client
