// Processes: pidfds, executing and forking them, signals, ending and reaping them, and what /proc says.
//
// A pidfd names one process for ever; a pid is another process's as soon as the first is reaped. It polls
// readable when the process has ended (reaped or not).
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelmgr/failure.hpp"
#include "base/clock.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::ipc {

/// Throws SystemError; its code is ESRCH if there is no such process. Needs Linux 5.3.
base::UniqueFd open_pidfd(pid_t pid);

/// Does not block. False for a pidfd of -1.
bool has_ended(int pidfd) noexcept;

/// Blocks until the process has ended; false on the deadline.
bool wait_ended(int pidfd, base::Deadline deadline) noexcept;

/// Signals the process alone, not its group. Does nothing if it has ended. Async-signal-safe.
void send_signal(int pidfd, int signal) noexcept;

/// Signals all members of the process group that the process of `pidfd` leads, or led before it was reaped.
/// `pid` is for kernels before 6.9, which name a group only by its number. Async-signal-safe.
void send_group_signal(int pidfd, pid_t pid, int signal) noexcept;

/// Ends the other members of this process's group, if it leads one, then this process. Does not unwind: other
/// threads may use what is on any stack.
[[noreturn]] void exit_with_group(int code) noexcept;

/// Gives all signals their default disposition, and unblocks them.
void default_signals() noexcept;

/// The children of this process, including ended ones that are not reaped.
std::vector<pid_t> children();

/// Sets the name that ps shows, 15 characters at most: that of the process, and of the calling thread.
void name_process(const char* comm) noexcept;

/// Makes writing to a pipe without a reader (SIGPIPE), or beyond RLIMIT_FSIZE (SIGXFSZ), an error that this
/// process and its children survive.
void survive_failed_writes() noexcept;
/// This process ends when its host does, or asks it to. From now on the signals by which a scheduler or a
/// terminal tells all processes of a job to end do nothing here: the host decides what they mean. Their
/// handler is empty, not SIG_IGN, so that a program which this process executes has their default actions.
void leave_signals_to_host() noexcept;
inline constexpr int signals_of_host[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};

struct Child {
  pid_t pid = 0;
  base::UniqueFd pidfd;
};

/// Sets the command that execute_self() runs, for a program that an interpreter runs: the path of a program,
/// then the arguments that precede those of the call. Empty: the image of this process. Not safe while
/// another thread executes a command.
void set_self(std::vector<std::string> command);

/// The command that execute_self() runs, for a caller that executes it in a child of its own.
struct SelfCommand {
  std::string program;                 ///< For execv().
  std::vector<std::string> arguments;  ///< argv, with its name first.
};
SelfCommand self_command();

/// Executes this program again, with `args` after its name. The child has a process group of its own, default
/// signal dispositions, no blocked signal, and this process's environment. It inherits standard input, output
/// and error, and the first descriptor of each pair in `fds`, under the second number of the pair (3 or
/// more); no others. Other threads may run meanwhile. Throws UsageError for invalid descriptor numbers,
/// SystemError.
Child execute_self(std::vector<std::string> args,
                   std::span<const std::pair<int /*ours*/, int /*theirs*/>> fds);
/// Like execute_self(), for another program: `command` is its path and the arguments before `args`.
Child execute(const std::vector<std::string>& command, std::vector<std::string> args,
              std::span<const std::pair<int, int>> fds);

/// Forks this process and runs `body` in the child. The child has a process group of its own, default signal
/// dispositions, no blocked signal, and copies of all descriptors. Locks that other threads of this process
/// hold stay locked there. Throws SystemError.
/// Requires: `body` neither returns nor throws.
Child fork_self(const std::function<void()>& body);

/// Runs `body` on a new thread, and blocks until it has returned. Throws what it throws, and SystemError if
/// no thread can be started. A child that `body` forks has that thread alone, which has done nothing yet: on
/// a thread that has done work, OpenMP and other libraries keep a team of threads, and would wait for it in
/// the child, where it does not exist. The stack of the thread that waits here is free in the child, and may
/// become that of another thread.
void on_new_thread(const std::function<void()>& body);

/// Stands for a status of waitpid() that is not known.
inline constexpr int unknown_exit = -1;

/// Describes a status of waitpid(), or unknown_exit: "killed by signal 9 (KILL)", "exit code 3".
std::string describe_exit(int wait_status);
/// "TERM" for SIGTERM; empty for one without a name.
std::string_view signal_name(int number) noexcept;

/// Ends the process group that `child` leads: sends TERM, then KILL when the child has ended or `term_until`
/// has passed. Reaps `child` if it is a child of this process. Blocks. False if it has not ended
/// timing::killed_child_ends_s after that (it sits in the kernel).
bool end_group(const Child& child, base::Deadline term_until) noexcept;

/// Sets exit_code, signal and exit of a failure from such a status.
void set_exit(Failure& failure, int wait_status);

struct ProcessUsage {
  std::uint64_t peak_rss_bytes;  ///< Shared pages included.
  std::uint64_t rss_bytes;
  std::uint64_t cpu_ns;  ///< User and system time of all threads, in multiples of a kernel tick (10 ms).
  char state;            ///< R running, S sleeping, D in the kernel, T stopped, Z ended and not reaped.
};

/// nullopt if there is no such process.
std::optional<ProcessUsage> usage(pid_t pid);

/// When the process began, in ticks since the machine did: with the pid it names one process. nullopt if
/// there is none, or /proc cannot be read.
std::optional<std::uint64_t> began_at(pid_t pid);

/// Bytes of memory that a process shares with no file and no other process: without the session and
/// libraries. nullopt if there is no such process. Cheaper than usage().
std::optional<std::uint64_t> private_bytes(pid_t pid);

/// The kernel function in which the process's main thread sleeps ("futex_wait_queue"); empty if it runs, or
/// if the kernel does not say.
std::string wait_channel(pid_t pid);

/// Reaps a child of this process that has ended, and returns its status as waitpid() gives it. nullopt if it
/// still runs, is no child of this process, or was reaped before.
std::optional<int> take_exit_status(int pidfd) noexcept;

/// If a signal has killed the child, ends the other members of its process group, which the child could not:
/// with SIGTERM, and SIGKILL after `timing::group_end_s`.
/// Requires: the child is not reaped yet; it may still run.
void end_group_of_killed(const Child& child) noexcept;

/// From now on this process is killed when the thread of `parent` that forked it ends. Exits at once if
/// `parent` has ended already.
void die_with(pid_t parent) noexcept;

/// The number of threads of this process. Throws SessionError if /proc is not mounted.
int thread_count();

/// True if this process has one thread. Threads that end just now do not count: one that was joined is listed
/// by the kernel for a moment longer, for which this waits. Throws as thread_count() does.
bool has_one_thread();

/// The names of the threads of this process.
std::vector<std::string> thread_names();

}  // namespace accelmgr::ipc
