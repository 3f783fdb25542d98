#include "base/ipc/leftovers.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/ipc/proc_file.hpp"
#include "base/ipc/process.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::ipc {
namespace {

namespace fs = std::filesystem;

constexpr const char* variable = "ACCELMGR_DESCENDS_FROM";

/// Pidfds of the processes of this machine that have not ended and for which `is_meant` is true.
template <class IsMeant>
std::vector<base::UniqueFd> processes(const IsMeant& is_meant) {
  std::vector<base::UniqueFd> found;
  for (const auto& process : fs::directory_iterator("/proc")) {
    const auto pid = static_cast<pid_t>(leading_number(process.path().filename().string()).value_or(0));
    if (pid == 0 || !is_meant(pid)) continue;
    base::UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    // Twice: the pid may have been another process's when the pidfd was opened.
    if (pidfd && !has_ended(pidfd.get()) && is_meant(pid)) found.push_back(std::move(pidfd));
  }
  return found;
}

void signal_and_wait(const std::vector<base::UniqueFd>& processes, int signal,
                     base::Deadline deadline) noexcept {
  for (const auto& process : processes) {
    send_signal(process.get(), signal);
    send_signal(process.get(), SIGCONT);
  }
  for (const auto& process : processes) wait_ended(process.get(), deadline);
}

template <class IsMeant>
bool end_processes(base::Deadline term_until, const IsMeant& is_meant) noexcept {
  try {
    auto left = processes(is_meant);
    if (left.empty()) return true;
    signal_and_wait(left, SIGTERM, term_until);
    const auto bound = base::Deadline::in_seconds(timing::killed_child_ends_s);
    for (left = processes(is_meant); !left.empty() && !bound.passed(); left = processes(is_meant))
      signal_and_wait(left, SIGKILL, bound);
    return left.empty();
  } catch (const std::exception&) {
    return false;  // /proc cannot be read.
  }
}

/// A process of another user shows no environment.
bool bears(pid_t pid, const std::string& mark) {
  const auto limits = read_proc(fmt::format("/proc/{}/limits", pid)).value_or("");
  if (std::to_string(number_after(limits, "Max file locks").value_or(0)) == mark) return true;
  const auto entry = fmt::format("{}={}", variable, mark) + '\0';
  const auto environment = '\0' + read_proc(fmt::format("/proc/{}/environ", pid)).value_or("");
  return environment.find('\0' + entry) != std::string::npos;
}

}  // namespace

bool end_group_members(pid_t group, base::Deadline term_until) noexcept {
  return end_processes(term_until, [group](pid_t pid) { return pid != group && getpgid(pid) == group; });
}

void mark_descendants() {
  constexpr int pid_bits = 22;  // PID_MAX_LIMIT
  const auto mark = began_at(getpid()).value_or(0) << pid_bits | static_cast<std::uint64_t>(getpid());
  rlimit limit{};
  getrlimit(RLIMIT_LOCKS, &limit);
  limit.rlim_cur = mark;
  // Fails where the hard limit was lowered: then processes with another environment bear no mark.
  if (setrlimit(RLIMIT_LOCKS, &limit) != 0)
    base::log().info("the descendants of this process are marked by '{}' alone: {}", variable,
                     SystemError("setrlimit(RLIMIT_LOCKS)", errno).what());
  if (setenv(variable, std::to_string(mark).c_str(), 1) != 0) throw SystemError("setenv", errno);
}

std::string own_mark() {
  const char* mark = getenv(variable);
  return mark != nullptr ? mark : "";
}

bool end_marked(const std::string& mark, base::Deadline term_until) noexcept {
  const pid_t self = getpid(), session = getsid(0);
  return end_processes(term_until, [&](pid_t pid) {
    if (pid == self || getsid(pid) != session) return false;
    const auto own = children();
    return std::ranges::find(own, pid) != own.end() || bears(pid, mark);
  });
}

}  // namespace accelmgr::ipc
