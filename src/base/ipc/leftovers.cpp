#include "base/ipc/leftovers.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <system_error>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/ipc/proc_file.hpp"
#include "base/ipc/process.hpp"
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

std::string name_of_descriptor(const std::string& mark) { return "accelmgr-" + mark; }

/// A process of another user shows neither environment nor descriptors.
bool bears(pid_t pid, const std::string& mark) {
  const auto entry = fmt::format("{}={}", variable, mark) + '\0';
  const auto environment = '\0' + read_proc(fmt::format("/proc/{}/environ", pid)).value_or("");
  if (environment.find('\0' + entry) != std::string::npos) return true;
  const auto file = fmt::format("/memfd:{} (deleted)", name_of_descriptor(mark));
  std::error_code ended;
  for (fs::directory_iterator fd(fmt::format("/proc/{}/fd", pid), ended), end; fd != end; fd.increment(ended))
    if (fs::read_symlink(fd->path(), ended) == file) return true;
  return false;
}

}  // namespace

bool end_group_members(pid_t group, base::Deadline term_until) noexcept {
  return end_processes(term_until, [group](pid_t pid) { return pid != group && getpgid(pid) == group; });
}

void mark_descendants() {
  const auto mark = fmt::format("{}-{}", getpid(), began_at(getpid()).value_or(0));
  static base::UniqueFd fd;  // As long as this process.
  fd.reset(memfd_create(name_of_descriptor(mark).c_str(), MFD_CLOEXEC));
  if (!fd) throw SystemError("marking the descendants of this process", errno);
  if (setenv(variable, mark.c_str(), 1) != 0) throw SystemError("setenv", errno);
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
