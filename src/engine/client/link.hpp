// The link of a host to a manager: their messages, and the pidfds of the processes whose ends the host must
// see. How the manager was started does not matter here.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/ipc/process.hpp"
#include "base/unique_fd.hpp"
#include "engine/protocol/messages.hpp"
#include "engine/session/step_word.hpp"

namespace accelmgr::client {

/// Used by one thread.
class Link {
 public:
  /// The process `manager` has the other end of `socket`. `lease`: that of a host of a service; 0 for the
  /// host that has started the manager.
  Link(base::UniqueFd socket, ipc::Child manager, std::uint64_t lease = 0)
      : socket_(std::move(socket)),
        manager_(std::move(manager)),
        lease_(lease),
        runners_(session::max_ranks) {}

  /// Until the manager has started, OwnedManager reads and writes this socket itself.
  int socket() const noexcept { return socket_.get(); }
  /// Takes the pidfds of the fork server and of the first runners.
  void take_in(protocol::Started started);
  /// The manager takes this as a request to stop.
  void close() noexcept { socket_.reset(); }

  std::uint64_t lease() const noexcept { return lease_; }
  const ipc::Child& manager() const noexcept { return manager_; }
  pid_t manager_pid() const noexcept { return manager_.pid; }
  bool manager_ended() const noexcept;
  /// Blocks until the manager has ended or the deadline has passed. Returns whether it has ended.
  bool wait_until_manager_ended(base::Deadline deadline) const noexcept;
  /// Blocks until the fork server and all runners whose pidfds are here have ended, or the deadline has
  /// passed. Returns whether all have ended.
  bool wait_until_others_ended(base::Deadline deadline) const noexcept;
  bool runner_ended(int rank) const noexcept;
  bool fork_server_ended() const noexcept;
  /// Whether the pidfd of that generation of a rank is here. Only then the host can see its end.
  bool holds(int rank, std::uint32_t generation) const noexcept;

  /// Sends SIGKILL to the manager and the runners. Does not wait. The fork server ends by itself then, and
  /// kills runners whose pidfds are not here yet. Async-signal-safe.
  void kill() const noexcept;
  void kill_runners() const noexcept;
  void kill_fork_server() const noexcept;
  /// From now on the manager counts as ended.
  void forget_manager() noexcept { manager_.pidfd.reset(); }

  /// Throws SessionError when the manager is gone or reads nothing, SystemError (EPIPE) if it ends just now.
  void send(const protocol::Request& request) const;
  /// Takes in the notices that the manager has sent. Does not block. A notice for whose descriptors this
  /// process has no room stays in the socket for a later call.
  void take_notices();
  /// Why a notice was left in the socket; empty if none was.
  const std::string& unread() const noexcept { return unread_; }
  /// Blocks until the answer to Resize comes. Throws SessionError at the deadline, when the wait is
  /// interrupted, and when the manager is gone.
  protocol::Resized take_resized(base::Deadline deadline);
  /// The checkpoints that were written or failed since the last call, in order. Does not block.
  std::deque<protocol::Saved> take_saved();
  /// Blocks until the manager has sent something, closed its socket or ended: true. At next_look(deadline):
  /// false. A child of the manager's user code may hold its socket open after its end.
  bool hears_within(base::Deadline deadline) const noexcept;

 private:
  struct Runner {
    std::uint32_t generation = 0;
    base::UniqueFd pidfd;
  };
  void take_in(protocol::Notice notice);
  void take_in(protocol::Joined joined);

  base::UniqueFd socket_;
  ipc::Child manager_;
  std::uint64_t lease_ = 0;
  base::UniqueFd fork_server_pidfd_;
  std::vector<Runner> runners_;  ///< By rank. Never resized: kill() may run in a signal handler.
  std::string unread_;
  std::deque<protocol::Resized> resized_;
  int late_resized_ = 0;  ///< Answers still to come whose callers gave up.
  std::deque<protocol::Saved> saved_;
};

/// The earlier of `deadline` and timing::look_s from now, when a wait asks whether it is interrupted.
base::Deadline next_look(base::Deadline deadline) noexcept;

}  // namespace accelmgr::client
