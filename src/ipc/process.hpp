// Processes: pidfds, execution of this program again, ends, and what /proc says.
//
// A pidfd names one process for ever; a pid is another process's as soon as the first is reaped. It polls
// readable when the process has ended (reaped or not).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::ipc {

/// Throws SystemError; ESRCH: there is no such process. Needs Linux 5.3.
base::UniqueFd open_pidfd(pid_t pid);

/// False too for a pidfd of -1.
bool has_ended(int pidfd) noexcept;

/// Blocks; returns whether it has ended.
bool wait_ended(int pidfd, base::Deadline deadline) noexcept;

/// Of the process alone, not its group. Nothing happens if it has ended. Async-signal-safe.
void send_signal(int pidfd, int signal) noexcept;

/// To all of the process group that the process with this pidfd leads, or led: also when it has been reaped.
/// `pid` is for kernels before 6.9, where nothing but the number names a group. Async-signal-safe.
void send_group_signal(int pidfd, pid_t pid, int signal) noexcept;

/// Kills and reaps the children of this process, and theirs as they become its own (PR_SET_CHILD_SUBREAPER),
/// until none is left; false when one still is at the deadline. The process has one thread.
bool end_all_children(base::Deadline deadline) noexcept;

/// Ends all processes of a group but its leader, if there is one: TERM, so that trackers of resources which
/// heed the end of their clients can clean up, and when the bound has passed KILL. False when one cannot be
/// killed within a second more, or /proc cannot be read.
bool end_group_members(pid_t group, base::Deadline term_until) noexcept;

/// All signals get their default disposition, and none is blocked any more.
void default_signals() noexcept;

/// The children of this process, ended ones that were not reaped included.
std::vector<pid_t> children();

/// Names the process as ps shows it, 15 characters at most. Call it on the main thread.
void name_process(const char* comm) noexcept;

/// Writing to a pipe whose reader is gone (SIGPIPE), or beyond RLIMIT_FSIZE (SIGXFSZ), is an error in this
/// process and its children, not their end.
void survive_failed_writes() noexcept;

struct Child {
  pid_t pid = 0;
  base::UniqueFd pidfd;
};

/// What execute_self() runs, for a program that is not its own image but what an interpreter runs: a program
/// by its path, and the arguments before those of the call; empty: the image again. Not while another thread
/// executes.
void set_self(std::vector<std::string> command);

/// What execute_self() runs, for who executes it in a child of its own.
struct SelfCommand {
  std::string program;                 ///< For execv().
  std::vector<std::string> arguments;  ///< argv, with its name first.
};
SelfCommand self_command();

/// Runs this program again, with `args` after its name: in a process group of its own, with the default
/// signal dispositions and no signal blocked, with this process's environment. It inherits standard input,
/// output and error, and of each pair of `fds` the first, as descriptor number second (3 or more); nothing
/// else. Works while other threads run. Throws UsageError, SystemError.
Child execute_self(std::vector<std::string> args,
                   std::span<const std::pair<int /*ours*/, int /*theirs*/>> fds);

/// Forks this process: `body`, which does not return, runs in the child, in a process group of its own, with
/// the default signal dispositions, no signal blocked, and copies of all descriptors. Of other threads the
/// child has what they held locked. Throws SystemError.
Child fork_self(const std::function<void()>& body);

/// Instead of a status as waitpid() gives it, where nobody has told it.
inline constexpr int unknown_exit = -1;

/// "killed by signal 9 (KILL)", "exit code 3": of a status as waitpid() gives it, or unknown_exit.
std::string describe_exit(int wait_status);

/// Ends the process group that `child` leads: TERM, and when the child has ended or `term_until` has passed
/// KILL; then reaps it, if it is a child of this process. False when it cannot be killed (it sits in the
/// kernel) within a second more.
bool end_group(const Child& child, base::Deadline term_until) noexcept;

struct ProcessUsage {
  std::uint64_t peak_rss_bytes;  ///< Shared pages included.
  std::uint64_t rss_bytes;
  std::uint64_t cpu_ns;  ///< User and system, of all threads; counted in ticks of the kernel (10 ms).
  char state;            ///< R running, S sleeping, D in the kernel, T stopped, Z ended and not reaped.
};

/// nullopt when there is no such process.
std::optional<ProcessUsage> usage(pid_t pid);

/// The function of the kernel in which its main thread sleeps ("futex_wait_queue"); empty when it runs, or
/// the kernel does not tell.
std::string wait_channel(pid_t pid);

/// The status of a child of this process that has ended, as waitpid() gives it; reaps it. nullopt when it
/// still runs or is no child (any more).
std::optional<int> take_exit_status(int pidfd) noexcept;

/// From now on this process is killed when the thread of `parent` that made it ends; at once if `parent` has
/// ended already.
void die_with(pid_t parent) noexcept;

/// Threads of this process.
int thread_count();

/// Their names.
std::vector<std::string> thread_names();

}  // namespace accelmgr::ipc
