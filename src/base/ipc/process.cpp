#include "base/ipc/process.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <iterator>

#include "accelmgr/errors.hpp"
#include "base/ipc/leftovers.hpp"
#include "base/ipc/wait_ready.hpp"
#include "base/timing.hpp"
#include "base/unmovable.hpp"

namespace accelmgr::ipc {
namespace {

void check(int error, const char* call) {
  if (error != 0) throw SystemError(call, error);
}

class FileActions : base::Unmovable {
 public:
  FileActions() { check(posix_spawn_file_actions_init(&actions_), "posix_spawn_file_actions_init"); }
  ~FileActions() { posix_spawn_file_actions_destroy(&actions_); }

  void duplicate(int from, int to) {
    check(posix_spawn_file_actions_adddup2(&actions_, from, to), "posix_spawn_file_actions_adddup2");
  }
  void close(int fd) {
    check(posix_spawn_file_actions_addclose(&actions_, fd), "posix_spawn_file_actions_addclose");
  }
  /// Without the function of glibc 2.34, a descriptor that another thread opens meanwhile is left open.
  void close_from(int first) {
    static const auto add = reinterpret_cast<int (*)(posix_spawn_file_actions_t*, int)>(
        dlsym(RTLD_DEFAULT, "posix_spawn_file_actions_addclosefrom_np"));
    if (add != nullptr) return check(add(&actions_, first), "posix_spawn_file_actions_addclosefrom_np");
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
      if (const int fd = std::stoi(entry.path().filename()); fd >= first) close(fd);
  }
  const posix_spawn_file_actions_t* get() const noexcept { return &actions_; }

 private:
  posix_spawn_file_actions_t actions_;
};

/// Gives the child a process group of its own, default signal dispositions and no blocked signal.
class Attributes : base::Unmovable {
 public:
  Attributes() {
    check(posix_spawnattr_init(&attributes_), "posix_spawnattr_init");
    sigset_t all, none;
    sigfillset(&all);
    sigemptyset(&none);
    posix_spawnattr_setpgroup(&attributes_, 0);
    posix_spawnattr_setsigdefault(&attributes_, &all);
    posix_spawnattr_setsigmask(&attributes_, &none);
    posix_spawnattr_setflags(&attributes_,
                             POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
  }
  ~Attributes() { posix_spawnattr_destroy(&attributes_); }
  const posix_spawnattr_t* get() const noexcept { return &attributes_; }

 private:
  posix_spawnattr_t attributes_;
};

/// Adds the actions that leave the child with exactly the descriptors 0, 1, 2 and `theirs`. Returns temporary
/// duplicates, which must live until the child is spawned. They are above all of `theirs`, so that no
/// duplication overwrites a descriptor that is still to be duplicated.
std::vector<base::UniqueFd> pass(std::span<const std::pair<int, int>> fds, FileActions& actions) {
  int last = STDERR_FILENO;
  for (const auto& [ours, theirs] : fds) {
    if (theirs <= STDERR_FILENO)
      throw UsageError(fmt::format("a descriptor must be passed as number 3 or more, not {}", theirs));
    last = std::max(last, theirs);
  }
  std::vector<base::UniqueFd> above;
  std::vector<bool> passed(static_cast<std::size_t>(last) + 1, false);
  for (const auto& [ours, theirs] : fds) {
    if (passed[static_cast<std::size_t>(theirs)])
      throw UsageError(
          fmt::format("two descriptors are passed as number {}; each needs a number of its own", theirs));
    passed[static_cast<std::size_t>(theirs)] = true;
    above.emplace_back(fcntl(ours, F_DUPFD_CLOEXEC, last + 1));
    if (!above.back()) throw SystemError(fmt::format("duplicating descriptor {}", ours), errno);
    actions.duplicate(above.back().get(), theirs);
  }
  for (int fd = STDERR_FILENO + 1; fd <= last; ++fd)
    if (!passed[static_cast<std::size_t>(fd)]) actions.close(fd);
  actions.close_from(last + 1);
  return above;
}

/// Whether `pidfd` is an unreaped child of this process. Until it is reaped, no other process gets its pid,
/// and no other group its number.
bool is_our_child(int pidfd) noexcept {
  siginfo_t info{};
  return waitid(P_PIDFD, static_cast<id_t>(pidfd), &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

std::vector<std::string>& own_command() {
  static std::vector<std::string> command;
  return command;
}

}  // namespace

// These are system calls because <sys/pidfd.h> of Debian 12 declares the functions for C alone.
base::UniqueFd open_pidfd(pid_t pid) {
  base::UniqueFd fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!fd) throw SystemError(fmt::format("pidfd_open of process {}", pid), errno);
  return fd;
}

bool has_ended(int pidfd) noexcept { return wait_ended(pidfd, base::Deadline::at_ns(0)); }

bool wait_ended(int pidfd, base::Deadline deadline) noexcept {
  return (wait_ready(pidfd, POLLIN, deadline) & POLLIN) != 0;
}

void send_signal(int pidfd, int signal) noexcept {
  syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0);
}

void send_group_signal(int pidfd, pid_t pid, int signal) noexcept {
  constexpr unsigned process_group = 1U << 2;  // PIDFD_SIGNAL_PROCESS_GROUP, Linux 6.9
  if (syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, process_group) != 0 && errno == EINVAL)
    kill(-pid, signal);
}

void exit_with_group(int code) noexcept {
  if (getpgrp() == getpid()) end_group_members(getpid(), base::Deadline::in_seconds(timing::group_end_s));
  _exit(code);
}

void default_signals() noexcept {
  for (int number = 1; number < _NSIG; ++number) signal(number, SIG_DFL);  // Fails for KILL and STOP.
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

void name_process(const char* comm) noexcept {
  prctl(PR_SET_NAME, comm);
  const base::UniqueFd name_of_first(open("/proc/self/comm", O_WRONLY | O_CLOEXEC));
  if (name_of_first && write(name_of_first.get(), comm, strlen(comm)) < 0) return;  // It keeps its name.
}

void survive_failed_writes() noexcept {
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
}

void leave_signals_to_host() noexcept {
  struct sigaction action {};
  action.sa_handler = [](int) {};
  action.sa_flags = SA_RESTART;
  for (const int number : signals_of_host) sigaction(number, &action, nullptr);
}

void set_self(std::vector<std::string> command) { own_command() = std::move(command); }

namespace {

// It uses posix_spawn because the parent may have threads, and between fork and exec no code may take a lock
// that one of them holds. Besides, posix_spawn does not copy the page tables of a host with gigabytes.
Child execute(const char* program, const std::vector<std::string>& command, std::vector<std::string> args,
              std::span<const std::pair<int, int>> fds) {
  args.insert(args.begin(), command.begin(), command.end());
  std::vector<char*> argv;
  argv.reserve(args.size() + 1);
  for (auto& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  FileActions actions;
  const auto above = pass(fds, actions);
  const Attributes attributes;
  Child child;
  if (const int error =
          posix_spawn(&child.pid, program, actions.get(), attributes.get(), argv.data(), environ);
      error != 0)
    throw SystemError(fmt::format("executing {}", args[0]), error);
  try {
    child.pidfd = open_pidfd(child.pid);
  } catch (const SystemError&) {
    kill(child.pid, SIGKILL);
    waitpid(child.pid, nullptr, 0);
    throw;
  }
  return child;
}

}  // namespace

SelfCommand self_command() {
  if (const auto& self = own_command(); !self.empty()) return {self.front(), self};
  const char* program = "/proc/self/exe";  // This program, even if its file has been replaced meanwhile.
  std::error_code unknown;
  return {program, {std::filesystem::read_symlink(program, unknown).string()}};
}

Child execute_self(std::vector<std::string> args, std::span<const std::pair<int, int>> fds) {
  const auto self = self_command();
  return execute(self.program.c_str(), self.arguments, std::move(args), fds);
}

Child execute(const std::vector<std::string>& command, std::vector<std::string> args,
              std::span<const std::pair<int, int>> fds) {
  return execute(command.at(0).c_str(), command, std::move(args), fds);
}

Child fork_self(const std::function<void()>& body) {
  Child child;
  child.pid = fork();
  if (child.pid < 0) throw SystemError("forking this process", errno);
  if (child.pid == 0) {
    setpgid(0, 0);
    default_signals();
    [&]() noexcept { body(); }();  // What it throws must not reach the caller, whose work is the parent's.
    _exit(1);
  }
  setpgid(child.pid, child.pid);  // The child does the same, whichever process runs first.
  child.pidfd = open_pidfd(child.pid);
  return child;
}

void on_new_thread(const std::function<void()>& body) {
  struct Call {
    const std::function<void()>& body;
    std::exception_ptr thrown;
  } call{body, nullptr};
  // The stack of a main thread grows up to this limit. A child runs on the stack of this thread.
  constexpr std::size_t least_stack = 64 << 20;
  rlimit limit{};
  getrlimit(RLIMIT_STACK, &limit);
  const bool bounded = limit.rlim_cur != RLIM_INFINITY;
  pthread_attr_t attributes;
  check(pthread_attr_init(&attributes), "pthread_attr_init");
  pthread_attr_setstacksize(&attributes, std::max<std::size_t>(least_stack, bounded ? limit.rlim_cur : 0));
  pthread_t thread;
  const int error = pthread_create(
      &thread, &attributes,
      [](void* pointer) -> void* {
        auto& called = *static_cast<Call*>(pointer);
        try {
          called.body();
        } catch (...) {
          called.thrown = std::current_exception();
        }
        return nullptr;
      },
      &call);
  pthread_attr_destroy(&attributes);
  check(error, "starting a thread that forks");
  pthread_join(thread, nullptr);
  if (call.thrown) std::rethrow_exception(call.thrown);
}

// sigabbrev_np() has them since glibc 2.32.
std::string_view signal_name(int number) noexcept {
  static constexpr std::string_view names[]{
      "",     "HUP",  "INT",  "QUIT", "ILL",    "TRAP",   "ABRT",  "BUS",  "FPE",  "KILL", "USR1",
      "SEGV", "USR2", "PIPE", "ALRM", "TERM",   "STKFLT", "CHLD",  "CONT", "STOP", "TSTP", "TTIN",
      "TTOU", "URG",  "XCPU", "XFSZ", "VTALRM", "PROF",   "WINCH", "POLL", "PWR",  "SYS"};
  static_assert(std::size(names) == SIGSYS + 1);
  return number > 0 && number <= SIGSYS ? names[number] : std::string_view();
}

std::string describe_exit(int wait_status) {
  if (wait_status == unknown_exit) return "ended in an unknown way";
  if (WIFEXITED(wait_status)) return fmt::format("exit code {}", WEXITSTATUS(wait_status));
  if (!WIFSIGNALED(wait_status)) return fmt::format("wait status {:#x}", wait_status);
  const int signal = WTERMSIG(wait_status);
  const auto name = signal_name(signal);
  return fmt::format("killed by signal {} ({})", signal, !name.empty() ? name : "no name");
}

void set_exit(Failure& failure, int wait_status) {
  const bool by_signal = wait_status != unknown_exit && WIFSIGNALED(wait_status);
  failure.signal = by_signal ? WTERMSIG(wait_status) : 0;
  failure.exit_code = by_signal || wait_status == unknown_exit ? 0 : WEXITSTATUS(wait_status);
  failure.exit = describe_exit(wait_status);
}

std::optional<int> take_exit_status(int pidfd) noexcept {
  siginfo_t info{};
  if (waitid(P_PIDFD, static_cast<id_t>(pidfd), &info, WEXITED | WNOHANG) != 0 || info.si_pid == 0)
    return std::nullopt;
  if (info.si_code == CLD_EXITED) return W_EXITCODE(info.si_status, 0);
  return W_EXITCODE(0, info.si_status);
}

void end_group_of_killed(const Child& child) noexcept {
  siginfo_t info{};
  const auto pidfd = static_cast<id_t>(child.pidfd.get());
  const bool ended = waitid(P_PIDFD, pidfd, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
  if (ended && info.si_code != CLD_EXITED)
    end_group_members(child.pid, base::Deadline::in_seconds(timing::group_end_s));
}

void die_with(pid_t parent) noexcept {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(0);
}

bool end_group(const Child& child, base::Deadline term_until) noexcept {
  if (!child.pidfd) return true;
  const int pidfd = child.pidfd.get();
  const auto signal_group = [&](int signal) {
    if (is_our_child(pidfd) || !has_ended(pidfd)) kill(-child.pid, signal);
  };
  signal_group(SIGTERM);
  wait_ended(pidfd, term_until);
  signal_group(SIGKILL);  // Even if the leader has ended: other members of its group may run.
  const bool ended = wait_ended(pidfd, base::Deadline::in_seconds(timing::killed_child_ends_s));
  siginfo_t info{};
  if (ended) waitid(P_PIDFD, static_cast<id_t>(pidfd), &info, WEXITED | WNOHANG);
  return ended;
}

}  // namespace accelmgr::ipc
