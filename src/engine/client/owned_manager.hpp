// A manager process that this process owns: how it is started, ended and killed.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/errors.hpp"
#include "base/unique_fd.hpp"
#include "engine/client/link.hpp"

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

/// Used by one thread. The destructor does not end the manager: the owner must call end().
class OwnedManager {
 public:
  /// What start() calls as it goes on.
  struct Events {
    /// The manager has chosen the devices. Not called when the configuration leaves it no choice.
    std::function<void(const protocol::Assigned&)> assigned{};
    /// Gets the descriptors of a session that holds the initial parameters. There are no runners yet.
    std::function<void(protocol::Prepared)> prepared{};
  };

  /// Starts a manager that makes a session, and blocks until its runners are ready. Calls `interrupted` every
  /// 20 ms. Throws the error with which the manager failed; ForkHangs;
  /// SessionError when `interrupted` returned true, the manager died, or did not answer in time.
  static OwnedManager start(const Config& config, const Origin& origin,
                            const std::function<bool()>& interrupted, const Events& events);
  /// Starts a manager that takes over the session of the descriptors `session`. Calls `free_session` before
  /// that manager looks at the session: no process of an earlier manager may work on it when that returns.
  /// Blocks and throws as start().
  static OwnedManager start_over(const Config& config, const Origin& origin, const std::vector<int>& session,
                                 const std::function<void()>& free_session);
  OwnedManager(OwnedManager&&) noexcept = default;
  /// The manager that is replaced must have ended. The address of link() does not change.
  OwnedManager& operator=(OwnedManager&&) = default;

  Link& link() noexcept { return link_; }
  const Link& link() const noexcept { return link_; }

  void ask_to_stop() const noexcept;
  /// Blocks until manager, fork server and runners have ended. Kills those that do not end by themselves
  /// within timing::manager_stop_s, and waits for them that long again. Returns how the manager ended, as
  /// text; empty at a second call.
  std::string end() noexcept;

 private:
  OwnedManager(Link link, base::UniqueFd status) : link_(std::move(link)), status_(std::move(status)) {}
  static OwnedManager execute(const Origin& origin);
  /// For a start that has failed: lets go of the manager. How it ended, if it had died.
  std::optional<std::string> end_of_dead() noexcept;
  void bring_up(const Config& config, const std::vector<int>& session,
                const std::function<void()>& free_session, const std::function<bool()>& interrupted,
                const Events& events);
  std::variant<protocol::Started, protocol::Failed> receive_started(double start_timeout_s,
                                                                    const std::function<bool()>& interrupted,
                                                                    const Events& events) const;

  Link link_;
  base::UniqueFd status_;  ///< Pipe with its wait status, if the zygote reaps it.
  bool ended_ = false;
};

}  // namespace accelmgr::client
