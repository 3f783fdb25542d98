// The client's side of a fork server: starts it, asks it for children, and tells what becomes of them. Each
// child that was asked for ends here once, however that becomes known:
//
//   | its end is known by                          | after                | its wait status |
//   |----------------------------------------------|----------------------|-----------------|
//   | a report of the fork server                  |                      | as reported     |
//   | its pidfd, while the fork server is stopped  | timing::end_report_s | unknown_exit    |
//   | the end of the fork server, and its pidfd    |                      | SIGKILL         |
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <variant>

#include "base/clock.hpp"
#include "base/ipc/fork_server.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/ready_set.hpp"
#include "base/ipc/socket.hpp"
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
  /// When the fork server saw the end, by CLOCK_REALTIME. Children whose ends it saw together have the same
  /// time.
  std::int64_t time_ns;
  bool with_server = false;  ///< It ended because the fork server did; its pid is 0 if it had not started.
};

using Event = std::variant<Started, Ended>;

/// The client's side. One thread at a time may call it.
class ForkServerClient {
 public:
  /// Forks the fork server from this process. The fork server and its children inherit all open descriptors
  /// except `close_in_fork_server`, those on whose end another process waits. Sets `options.creator`.
  /// Requires: the other threads of this process are idle, as those of a library's pool: locks that they hold
  /// would stay locked in the fork server and its children.
  static ForkServerClient start(const ChildMain& child_main, ForkServerOptions options = {},
                                std::span<const int> close_in_fork_server = {});

  /// Like start(), for a process that may have threads. Before it forks children, the fork server only makes
  /// system calls and allocates memory. Sets `options.creator`.
  static ForkServerClient start_beside_threads(const ChildMain& child_main, ForkServerOptions options);

  /// The client of an existing process that calls run_fork_server() with the other end of `socket`.
  /// Throws SystemError.
  ForkServerClient(base::UniqueFd socket, Child process);
  ForkServerClient(ForkServerClient&&) noexcept = default;
  ForkServerClient& operator=(ForkServerClient&&) = delete;
  /// Calls stop() with a deadline of one second.
  ~ForkServerClient();

  /// Asks for a child of a rank that has none, which gets duplicates of `fds`. A Started event follows, and
  /// later Ended; or Ended alone, if the child cannot be forked, or if the fork server or this process has
  /// too many open descriptors. Throws SystemError, for which peer_is_gone() tells whether the fork server is
  /// gone, and SessionError if the fork server does not read.
  void spawn(int rank, std::uint32_t generation, std::span<const int> fds);

  /// Sends a signal to the process groups of all children, and continues stopped ones. Throws as spawn()
  /// does.
  void signal(int number);

  /// The next event that is known at `now_ns` (base::now_ns()). Does not block. Logs and skips invalid
  /// reports, and reports of ranks that were never spawned.
  std::optional<Event> take(std::int64_t now_ns);
  /// Blocks for the next event. nullopt on the deadline, or if the fork server has ended and all children
  /// have.
  std::optional<Event> next(base::Deadline deadline);

  /// Whether there are children whose end has not been taken.
  bool has_children() const noexcept { return !children_.empty(); }
  /// How the fork server ended, as waitpid() gives it, or unknown_exit if it is no child of this process.
  /// nullopt if it has not ended by the deadline.
  std::optional<int> server_exit(base::Deadline deadline = base::Deadline::at_ns(0)) noexcept;

  /// Readable when take() may have something new: a loop watches it and then takes all events.
  int descriptor() const noexcept { return ready_.descriptor(); }
  /// The connection to the fork server.
  int socket() const noexcept { return socket_.get(); }
  pid_t pid() const noexcept { return process_.pid; }
  int pidfd() const noexcept { return process_.pidfd.get(); }

  /// Ends the fork server and its children, and reaps the fork server; kills those that have not ended by the
  /// deadline, and waits for them for a bounded time. No events follow. In a child forked from the process
  /// that made this client, it only closes the child's copies of the descriptors.
  void stop(base::Deadline deadline) noexcept;

 private:
  struct Asked {
    std::uint32_t generation = 0;
    Child process;              ///< Empty until it has started.
    std::int64_t ended_ns = 0;  ///< When its pidfd was first seen to be readable.
  };
  std::optional<Event> take_report();
  /// nullopt for a late report of a child whose end was taken.
  std::optional<Event> event_of(Message& message);
  std::optional<Event> take_unreported(std::int64_t now_ns);
  void end_server_without_socket(std::int64_t now_ns) noexcept;
  void wake_for_what_is_overdue(std::int64_t now_ns) noexcept;
  void forget(std::map<int, Asked>::iterator child) noexcept;
  void kill_children() noexcept;

  base::UniqueFd socket_;
  Child process_;
  pid_t owner_ = getpid();
  std::set<int> asked_for_;        ///< Ranks, also those whose child has ended: late reports name them.
  std::map<int, Asked> children_;  ///< Children whose end has not been taken, by rank.
  std::int64_t closed_ns_ = 0;     ///< When the fork server was first seen to have closed its socket.
  bool killed_ = false;            ///< Because it hung after that.
  ReadySet ready_;
  std::optional<int> server_exit_;
  base::Refusals refusals_;
};

}  // namespace accelmgr::ipc
