// What user code leaves behind: processes that it has forked or executed. They are found by their process
// group where this program may have one of its own, else by a mark that they inherit.
#pragma once

#include <sys/types.h>

#include <string>

#include "base/clock.hpp"

namespace accelmgr::ipc {

/// Ends all processes of a group except its leader: sends TERM, which lets resource trackers clean up after
/// their clients, and KILL after `term_until`. Blocks. False if one has not ended
/// timing::killed_child_ends_s after that, or if /proc cannot be read.
bool end_group_members(pid_t group, base::Deadline term_until) noexcept;

/// From now on what this process forks or executes bears a mark: a limit that the kernel has kept since 2.4
/// without a use (RLIMIT_LOCKS), which no environment removes, and an environment variable. Throws
/// SystemError.
/// Requires: this process has one thread.
void mark_descendants();
/// The mark that this process bears or has made; empty if there is none.
std::string own_mark();
/// As end_group_members(), for the processes that bear `mark` and are in the session of this process, except
/// this one. Children of this process need no mark.
bool end_marked(const std::string& mark, base::Deadline term_until) noexcept;

}  // namespace accelmgr::ipc
