// The client's side of a fork server: starts it, asks it for children, and receives what becomes of them.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <variant>

#include "base/clock.hpp"
#include "base/ipc/fork_server.hpp"
#include "base/ipc/process.hpp"
#include "base/refusals.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::ipc {

struct Started {
  int rank;
  std::uint32_t generation;
  pid_t pid;
  base::UniqueFd pidfd;
};

struct Ended {
  int rank;
  std::uint32_t generation;
  pid_t pid;
  int wait_status;  ///< See describe_exit().
  int error;        ///< An errno value: why it could not be started (pid 0).
  /// When the fork server saw it, by CLOCK_REALTIME. Children whose ends it saw together have the same time.
  std::int64_t time_ns;
};

using Event = std::variant<Started, Ended>;

/// The client's side. One thread at a time may call it.
class ForkServerClient {
 public:
  /// Forks the fork server from this process, which must have one thread; otherwise throws UsageError, which
  /// lists the threads. The fork server and its children inherit all open descriptors except
  /// `close_in_fork_server`, those on whose end another process waits. Sets `options.creator`.
  static ForkServerClient start(const ChildMain& child_main, ForkServerOptions options = {},
                                std::span<const int> close_in_fork_server = {});

  /// Like start(), for a process that may have threads. Before it forks children, the fork server only makes
  /// system calls and allocates memory. Sets `options.creator`.
  static ForkServerClient start_beside_threads(const ChildMain& child_main, ForkServerOptions options);

  /// The client of an existing process that calls run_fork_server() with the other end of `socket`.
  ForkServerClient(base::UniqueFd socket, Child process)
      : socket_(std::move(socket)), process_(std::move(process)) {}
  ForkServerClient(ForkServerClient&&) noexcept = default;
  ForkServerClient& operator=(ForkServerClient&&) = delete;
  /// Calls stop() with a deadline of one second.
  ~ForkServerClient();

  /// Asks for a child, which gets duplicates of `fds`. A Started event follows; or Ended, if the child cannot
  /// be forked, or if the fork server or this process has too many open descriptors. Throws SystemError, for
  /// which peer_is_gone() tells whether the fork server is gone, and SessionError if the fork server does not
  /// read.
  void spawn(int rank, std::uint32_t generation, std::span<const int> fds);

  /// Sends a signal to the process groups of all children, and continues stopped ones. Throws as spawn()
  /// does.
  void signal(int number);

  /// Blocks for the next event. nullopt on the deadline, or if the fork server is gone (see pidfd()) and all
  /// its events have been taken. Logs and skips invalid events, and events of ranks that were never spawned.
  std::optional<Event> next(base::Deadline deadline);

  /// Readable when there is an event, or the fork server is gone.
  int socket() const noexcept { return socket_.get(); }
  pid_t pid() const noexcept { return process_.pid; }
  int pidfd() const noexcept { return process_.pidfd.get(); }

  /// The fork server's exit status, as waitpid() gives it; nullopt while it runs. Reaps it, so only the first
  /// call returns the status.
  std::optional<int> take_exit_status() noexcept { return ipc::take_exit_status(process_.pidfd.get()); }

  /// Ends the fork server and its children, and reaps the fork server; kills it if it has not ended by the
  /// deadline. No events follow. In a child forked from the process that made this client, it only closes the
  /// child's copies of the descriptors.
  void stop(base::Deadline deadline) noexcept;

 private:
  base::UniqueFd socket_;
  Child process_;
  pid_t owner_ = getpid();
  std::set<int> asked_for_;  ///< Ranks.
  base::Refusals refusals_;
};

}  // namespace accelmgr::ipc
