// The launcher: a fork server. It is forked while its image has one thread and no device context, and forks
// all runners, first ones and replacements.
//
//   client (manager)                 launcher                                  child (runner)
//     spawn {rank, generation} fds ->  fork ------------------------------------> child_main(request)
//     Started {.., pid} pidfd      <-  open its pidfd
//     Ended {.., pid, status}      <-  its pidfd is readable: kill its group, reap
//     end of the socket            ->  kill the groups of all children, reap, exit
//
// The launcher dies with the thread that started it, its children with the launcher (PR_SET_PDEATHSIG).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
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

/// The launcher's side, in a process of one thread. Returns its exit code when the socket has ended and no
/// child is left.
int run_launcher(base::UniqueFd socket, const ChildMain& child_main);

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
};

using Event = std::variant<Started, Ended>;

/// The client's side. One thread at a time.
class LauncherClient {
 public:
  /// Forks this process, which must have one thread: UsageError lists the threads if not. The launcher and
  /// its children inherit all that is open here, but `close_in_launcher`: descriptors whose end somebody
  /// waits for.
  static LauncherClient start(const ChildMain& child_main, std::span<const int> close_in_launcher = {});

  /// The client of a process that calls run_launcher() with the other end of `socket`.
  LauncherClient(base::UniqueFd socket, Child process)
      : socket_(std::move(socket)), process_(std::move(process)) {}
  LauncherClient(LauncherClient&&) noexcept = default;
  LauncherClient& operator=(LauncherClient&&) = delete;
  /// As stop() with a bound of one second.
  ~LauncherClient();

  /// Asks for a child, which gets duplicates of `fds`. Started follows, unless it cannot be forked: Ended.
  /// Throws SystemError (EPIPE) when the launcher is gone.
  void spawn(int rank, std::uint32_t generation, std::span<const int> fds);

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
  /// are no events.
  void stop(base::Deadline deadline) noexcept;

 private:
  base::UniqueFd socket_;
  Child process_;
};

}  // namespace accelmgr::ipc
