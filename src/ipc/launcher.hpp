// The launcher: a fork server. It forks all children of its client, first ones and replacements.
//
//   client (manager, spawn())        launcher                                  child (runner, rank)
//     spawn {rank, generation} fds ->  fork ------------------------------------> child_main(request)
//     Started {.., pid} pidfd      <-  open its pidfd
//     signal {number}              ->  to the groups of all children
//     Ended {.., pid, status}      <-  its pidfd is readable: kill its group, reap
//     stop, or end of the socket   ->  kill the groups of all children, reap, exit
//
// Its children die with the launcher (PR_SET_PDEATHSIG), which sees the end of the process that made it by a
// pidfd. That of a manager is forked while its image has one thread and no device context; when the manager
// has ended without asking it to stop, it ends what user code has forked there. That of a launch takes in
// what its children leave behind: LauncherOptions.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "ipc/process.hpp"

namespace accelmgr::ipc {

struct SpawnRequest {
  int rank;
  std::uint32_t generation;
  std::vector<base::UniqueFd> fds;
};

/// Runs in the child; what it returns is the exit code. An exception becomes exit_uncaught and a line on
/// standard error.
using ChildMain = std::function<int(SpawnRequest)>;

inline constexpr int exit_uncaught = 17;    ///< Of a child whose ChildMain threw.
inline constexpr int exit_not_forked = 18;  ///< Reported, with pid 0, for a child that could not be forked.

struct LauncherOptions {
  /// A pidfd: the launcher ends with that process, whoever else holds a copy of the client's socket. -1: with
  /// the socket alone.
  int creator = -1;
  /// The process group that the creator leads. If not 0, the launcher ends what is left of it when the
  /// creator has ended. One that has closed the socket without LauncherClient::stop() has a second for that.
  pid_t creator_group = 0;
  /// A pidfd: the process that the creator works for. When it has ended, the creator has a second to end by
  /// itself: it may be inside code of the user that does not return.
  int host = -1;
  /// Orphans of the children become the launcher's own (PR_SET_CHILD_SUBREAPER), whatever group and session
  /// they are in. They are killed when no child is left, and at the end.
  bool adopt_orphans = false;
  std::string child_name = "accelmgr:run";  ///< With the rank after it, the name of the process.
  bool core_dumps = false;                  ///< Of the children; true: as they inherit it.
};

/// The launcher's side, in a process of one thread. Returns its exit code when the socket has ended and no
/// child is left.
int run_launcher(base::UniqueFd socket, const ChildMain& child_main, const LauncherOptions& options = {});

/// The same for a process just forked from one that may have threads, or a terminal: in a group of its own,
/// deaf to the signals that ask to end. Ends the process. `options.creator` must be set.
[[noreturn]] void become_launcher_beside_threads(base::UniqueFd socket, const ChildMain& child_main,
                                                 const LauncherOptions& options) noexcept;

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
  int error;        ///< Why it could not be started (pid 0): an errno value.
  /// CLOCK_REALTIME, when the launcher saw it. Ends it saw together have the same.
  std::int64_t time_ns;
};

using Event = std::variant<Started, Ended>;

/// The client's side. One thread at a time.
class LauncherClient {
 public:
  /// Forks this process, which must have one thread: UsageError lists the threads if not. The launcher and
  /// its children inherit all that is open here, but `close_in_launcher`: descriptors whose end somebody
  /// waits for. `options.creator` is filled in.
  static LauncherClient start(const ChildMain& child_main, LauncherOptions options = {},
                              std::span<const int> close_in_launcher = {});

  /// Forks this process, which may have threads: until it forks children the launcher makes system calls and
  /// allocates, nothing else. `options.creator` is filled in.
  static LauncherClient start_beside_threads(const ChildMain& child_main, LauncherOptions options);

  /// The client of a process that calls run_launcher() with the other end of `socket`.
  LauncherClient(base::UniqueFd socket, Child process)
      : socket_(std::move(socket)), process_(std::move(process)) {}
  LauncherClient(LauncherClient&&) noexcept = default;
  LauncherClient& operator=(LauncherClient&&) = delete;
  /// As stop() with a bound of one second.
  ~LauncherClient();

  /// Asks for a child, which gets duplicates of `fds`. Started follows, unless it cannot be forked, or there
  /// is no room for descriptors in the launcher or here: Ended. Throws SystemError; peer_is_gone() says
  /// whether the launcher is.
  void spawn(int rank, std::uint32_t generation, std::span<const int> fds);

  /// Sends a signal to the process groups of all children; stopped ones go on. Throws as spawn() does.
  void signal(int number);

  /// The next event; nullopt when there is none before the deadline, or the launcher is gone (see pidfd())
  /// and all its events have been taken.
  std::optional<Event> next(base::Deadline deadline);

  /// Readable when there is an event, or the launcher is gone.
  int socket() const noexcept { return socket_.get(); }
  pid_t pid() const noexcept { return process_.pid; }
  int pidfd() const noexcept { return process_.pidfd.get(); }

  /// How it ended, as waitpid() gives it; nullopt while it runs. Reaps it: once.
  std::optional<int> take_exit_status() noexcept { return ipc::take_exit_status(process_.pidfd.get()); }

  /// Ends the launcher and its children; kills it when it has not ended by then. Reaps it. Afterwards there
  /// are no events. In a process forked from the one that made this, it only lets go of its copies.
  void stop(base::Deadline deadline) noexcept;

 private:
  base::UniqueFd socket_;
  Child process_;
  pid_t owner_ = getpid();
};

}  // namespace accelmgr::ipc
