// The fork server: a process that forks all children of its client, the first ones and their replacements.
//
//   client (manager, spawn())        fork server                               child (runner, rank)
//     spawn {rank, generation} fds ->  fork ------------------------------------> child_main(request)
//     Started {.., pid} pidfd      <-  open its pidfd
//     signal {number}              ->  to the groups of all children
//     Ended {.., pid, status}      <-  its pidfd is readable: kill its group, reap
//     stop, or end of the socket   ->  kill the groups of all children, reap, exit
//
// The children die with the fork server (PR_SET_PDEATHSIG). The fork server ends with its creator, the
// process that forked it, whose pidfd it watches. A manager forks its fork server while it has one thread and
// no device context. If the manager ends without asking its fork server to stop, the fork server kills what
// user code has forked in the manager's process group, or what bears its mark. The fork server of a launch
// adopts the orphans of its children. See ForkServerOptions. A client talks to it through a ForkServerClient
// (base/ipc/fork_server_client.hpp).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/unique_fd.hpp"

namespace accelmgr::ipc {

struct SpawnRequest {
  int rank;
  std::uint32_t generation;
  std::vector<base::UniqueFd> fds;
};

/// Runs in the child and returns its exit code. If it throws, the child prints the exception to standard
/// error and exits with exit_uncaught.
using ChildMain = std::function<int(SpawnRequest)>;

inline constexpr int exit_uncaught = 17;    ///< Exit code of a child whose ChildMain threw.
inline constexpr int exit_not_forked = 18;  ///< Reported, with pid 0, for a child that could not be forked.

struct ForkServerOptions {
  /// A pidfd. The fork server ends when this process ends, even if another process holds a copy of the
  /// client's socket. -1: it ends with the socket alone.
  int creator = -1;
  /// The process group that the creator leads, or 0. Unless ForkServerClient::stop() was called, the fork
  /// server waits up to a second for the creator to end, then kills it and what is left of this group.
  pid_t creator_group = 0;
  /// The mark of the creator's descendants (base/ipc/leftovers.hpp), if it leads no group of its own.
  /// Processes that bear it end as such a group does.
  std::string creator_mark{};
  /// A pidfd of the process that the creator works for. When that process has ended, the creator has a second
  /// to end by itself, because it may be in user code that does not return.
  int host = -1;
  /// The fork server adopts the orphans of its children (base/ipc/orphans.hpp). It kills them when no child
  /// is left, and at its own end.
  bool adopt_orphans = false;
  std::string child_name = "accelmgr:run";  ///< The name of a child's process, without the rank that follows.
  bool core_dumps = false;                  ///< False: children dump no core; true: as they inherit it.
  /// Called in the fork server before it forks anything. It must start no thread.
  std::function<void()> begin = [] {};
};

/// Runs the fork server in a process of one thread. Blocks until a stop, the end of the socket or of the
/// creator, and until no child is left. Returns its exit code.
int run_fork_server(base::UniqueFd socket, const ChildMain& child_main,
                    const ForkServerOptions& options = {});

/// Like run_fork_server(), for a process just forked from one that has one thread. It leads a process group
/// of its own, and exits.
[[noreturn]] void become_fork_server(base::UniqueFd socket, const ChildMain& child_main,
                                     const ForkServerOptions& options) noexcept;

/// Like become_fork_server(), for a process just forked from one that may have threads or a terminal. It
/// ignores HUP, INT, QUIT and TERM; its children begin with default signal dispositions. `options.creator`
/// must be set.
[[noreturn]] void become_fork_server_beside_threads(base::UniqueFd socket, const ChildMain& child_main,
                                                    const ForkServerOptions& options) noexcept;

}  // namespace accelmgr::ipc
