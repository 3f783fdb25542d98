// The link of a host to a manager: their messages, and the pidfds of the processes whose ends the host must
// see. engine/client/opening.hpp makes it. What a host may do to its manager follows from the Tenure.
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
  /// The process `manager` has the other end of `socket`. `status`: a pipe with its wait status, if another
  /// process reaps it.
  Link(base::UniqueFd socket, ipc::Child manager, base::UniqueFd status = {})
      : socket_(std::move(socket)),
        manager_(std::move(manager)),
        status_(std::move(status)),
        runners_(session::max_ranks) {}

  /// For the messages of the start, until Started.
  int socket() const noexcept { return socket_.get(); }
  /// Before this call the link is one to a manager that this process has started.
  void take_lease(protocol::Tenure tenure, std::uint64_t lease) noexcept {
    tenure_ = tenure;
    lease_ = lease;
  }
  /// Takes the pidfds of the fork server and of the first runners.
  void take_in(protocol::Started started);
  /// The manager takes this as a request to stop.
  void close() noexcept { socket_.reset(); }

  bool is_of_service() const noexcept { return tenure_ == protocol::Tenure::of_service; }
  std::uint64_t lease() const noexcept { return lease_; }
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

  /// Tells the manager that this host uses the session no more. The manager of a service goes on.
  void leave() const noexcept;
  /// Blocks until manager, fork server and runners have ended. Kills those that do not end by themselves
  /// within timing::manager_stop_s, and waits for them that long again; a service itself is never killed, so
  /// call it when that is gone. Returns how the manager ended, as text; empty at a second call.
  std::string end() noexcept;

  /// Sends SIGKILL to the manager and the runners. Does not wait. The fork server ends by itself then, and
  /// kills runners whose pidfds are not here yet. Async-signal-safe.
  void kill() const noexcept;

  /// Throws SessionError when the manager is gone or reads nothing, SystemError (EPIPE) if it ends just now.
  void send(const protocol::Request& request) const;
  /// Takes in the notices that the manager has sent. Does not block. A notice for whose descriptors this
  /// process has no room stays in the socket for a later call.
  void take_notices();
  /// Why a notice was left in the socket; empty if none was.
  const std::string& left_notice() const noexcept { return left_notice_; }
  /// Blocks until the answer to Resize comes. Throws SessionError at the deadline, when the wait is
  /// interrupted, and when the manager is gone.
  protocol::Resized take_resized(base::Deadline deadline);
  /// The checkpoints that were written or failed since the last call, in order. Does not block.
  std::deque<protocol::Saved> take_saved();
  /// Blocks until the manager has sent something, closed its socket or ended, and returns true; or until
  /// next_look(deadline), and returns false. A child of the manager's user code may hold its socket open
  /// after its end.
  bool hears_soon(base::Deadline deadline) const noexcept;

 private:
  struct Runner {
    std::uint32_t generation = 0;
    base::UniqueFd pidfd;
  };
  void take_in(protocol::Notice notice);
  void take_in(protocol::Joined joined);
  void kill_runners() const noexcept;
  std::string how_it_ended() const noexcept;

  base::UniqueFd socket_;
  ipc::Child manager_;
  base::UniqueFd status_;
  bool ended_ = false;  ///< end() was called.
  protocol::Tenure tenure_ = protocol::Tenure::of_host;
  std::uint64_t lease_ = 0;
  base::UniqueFd fork_server_pidfd_;
  std::vector<Runner> runners_;  ///< By rank. Never resized: kill() may run in a signal handler.
  std::string left_notice_;
  std::deque<protocol::Resized> resized_;
  int late_resized_ = 0;  ///< Answers still to come whose callers gave up.
  std::deque<protocol::Saved> saved_;
};

/// The earlier of `deadline` and timing::look_s from now, when a wait asks whether it is interrupted.
base::Deadline next_look(base::Deadline deadline) noexcept;

}  // namespace accelmgr::client
