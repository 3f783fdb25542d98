// The orphans of a process's children: what they have forked and left behind when they ended.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <functional>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "base/unmovable.hpp"

namespace accelmgr::ipc {

/// While it exists, this process adopts the orphans of its children (PR_SET_CHILD_SUBREAPER), whatever group
/// and session they are in: they become its children. The process must have one thread. A child that it forks
/// must destroy its copy.
class Orphans : base::Unmovable {
 public:
  /// Blocks SIGCHLD, which ended() then reports. Throws SystemError.
  Orphans();
  /// Restores the mask of signals. This process goes on adopting orphans; a forked child never does.
  ~Orphans();

  /// A descriptor that is readable when a child has ended, an adopted one or another.
  int ended() const noexcept { return ended_.get(); }

  /// Reaps orphans that have ended by themselves. `is_own` tells which children this process has forked
  /// itself. The call returns early when it meets one of those: its caller reaps it, and calls again.
  void reap_ended(const std::function<bool(pid_t)>& is_own) noexcept;

  /// Kills and reaps all children of this process, and their children as they are adopted. Children that it
  /// has forked itself are no exception, so call it when none is left. False if a process is left at the
  /// deadline.
  bool end_all(base::Deadline deadline) noexcept;

 private:
  base::UniqueFd ended_;  ///< A signalfd of SIGCHLD.
  sigset_t mask_before_{};
};

}  // namespace accelmgr::ipc
