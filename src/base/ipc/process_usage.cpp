#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "accelmgr/errors.hpp"
#include "base/ipc/proc_file.hpp"
#include "base/ipc/process.hpp"

namespace accelmgr::ipc {

std::optional<ProcessUsage> usage(pid_t pid) {
  const std::filesystem::path folder = fmt::format("/proc/{}", pid);
  const auto stat = read_proc(folder / "stat");
  const auto status = read_proc(folder / "status");
  if (!stat || !status) return std::nullopt;
  // The second field is the name in parentheses, which may itself contain blanks and parentheses.
  const auto name_end = stat->rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(stat->substr(name_end + 1));
  ProcessUsage usage{};
  fields >> usage.state;
  std::string skipped;
  constexpr int fields_between_state_and_utime = 10;
  for (int i = 0; i < fields_between_state_and_utime; ++i) fields >> skipped;
  std::uint64_t user_ticks = 0, system_ticks = 0;
  fields >> user_ticks >> system_ticks;
  usage.cpu_ns =
      (user_ticks + system_ticks) * (1'000'000'000 / static_cast<std::uint64_t>(sysconf(_SC_CLK_TCK)));
  // A process that has ended has no memory, and /proc has no such lines for it.
  usage.peak_rss_bytes = number_after(*status, "VmHWM:").value_or(0) * 1024;
  usage.rss_bytes = number_after(*status, "VmRSS:").value_or(0) * 1024;
  return usage;
}

std::optional<std::uint64_t> began_at(pid_t pid) {
  const auto stat = read_proc(fmt::format("/proc/{}/stat", pid));
  if (!stat) return std::nullopt;
  const auto fields = std::string_view(*stat).substr(std::min(stat->rfind(')') + 1, stat->size()));
  std::size_t at = 0;  // The blank before field 3; the name in parentheses is field 2.
  for (int field = 3; field < 22 && at != std::string_view::npos; ++field) at = fields.find(' ', at + 1);
  return at == std::string_view::npos ? std::nullopt : leading_number(fields.substr(at));
}

std::optional<std::uint64_t> private_bytes(pid_t pid) {
  const auto statm = read_proc(fmt::format("/proc/{}/statm", pid));
  if (!statm) return std::nullopt;
  std::istringstream fields(*statm);
  std::uint64_t size = 0, resident = 0, shared = 0;
  fields >> size >> resident >> shared;
  return (resident - std::min(resident, shared)) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

namespace {

/// For kernels without /proc/PID/task/TID/children.
std::vector<pid_t> children_by_parent() {
  std::vector<pid_t> pids;
  std::error_code gone;
  for (const auto& process : std::filesystem::directory_iterator("/proc", gone)) {
    const auto pid = leading_number(process.path().filename().string());
    if (!pid) continue;
    const auto status = read_proc(process.path() / "status").value_or("");
    if (number_after(status, "PPid:") == static_cast<std::uint64_t>(getpid()))
      pids.push_back(static_cast<pid_t>(*pid));
  }
  return pids;
}

}  // namespace

std::vector<pid_t> children() {
  std::vector<pid_t> pids;
  std::error_code gone;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", gone)) {
    const auto list = read_proc(task.path() / "children");
    if (!list && std::filesystem::exists(task.path(), gone)) return children_by_parent();
    std::istringstream numbers(list.value_or(""));
    for (pid_t pid = 0; numbers >> pid;) pids.push_back(pid);
  }
  return pids;
}

std::string wait_channel(pid_t pid) {
  const auto channel = read_proc(fmt::format("/proc/{}/wchan", pid)).value_or("");
  return channel == "0" ? "" : channel;
}

int thread_count() {
  const auto threads = number_after(read_proc("/proc/self/status").value_or(""), "Threads:");
  if (!threads) throw SessionError("/proc/self/status has no line Threads: is /proc mounted?");
#if defined(__SANITIZE_THREAD__)
  // Do not count the sanitizer's own thread, which starts before any other and in each forked process.
  if (*threads > 1) return static_cast<int>(*threads) - 1;
#endif
  return static_cast<int>(*threads);
}

bool has_one_thread() {
  constexpr double thread_ends_s = 0.5;
  for (const auto deadline = base::Deadline::in_seconds(thread_ends_s); thread_count() != 1; sched_yield())
    if (deadline.passed()) return false;
  return true;
}

std::vector<std::string> thread_names() {
  std::vector<std::string> names;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    if (const auto name = read_proc(task.path() / "comm")) names.push_back(name->substr(0, name->find('\n')));
  return names;
}

}  // namespace accelmgr::ipc
