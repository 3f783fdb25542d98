#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>

#include "accelmgr/errors.hpp"
#include "base/ipc/control_groups.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/proc_file.hpp"

namespace accelmgr::ipc {
namespace {

namespace fs = std::filesystem;

/// The names of the same files in the two versions of control groups.
struct Controller {
  const char* limit;
  const char* usage;
  // A line of memory.stat: the file pages that the kernel drops first. Shared memory is not among them.
  const char* reclaimable;
};
constexpr Controller v1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "};
constexpr Controller v2{"memory.max", "memory.current", "inactive_file "};

/// The bytes that the limit of one group leaves; nullopt without a limit ("max", or no such files).
std::optional<std::uint64_t> left_in(const fs::path& group, const Controller& controller) {
  const auto limit = leading_number(read_proc(group / controller.limit).value_or(""));
  const auto usage = leading_number(read_proc(group / controller.usage).value_or(""));
  if (!limit || !usage) return std::nullopt;
  const auto reclaimable =
      number_after(read_proc(group / "memory.stat").value_or(""), controller.reclaimable).value_or(0);
  const auto used = *usage - std::min(*usage, reclaimable);
  return *limit - std::min(*limit, used);
}

}  // namespace

MemoryAvailable memory_available(const fs::path& root) {
  const auto meminfo = root / "proc/meminfo";
  const auto kibibytes = number_after(read_proc(meminfo).value_or(""), "MemAvailable:");
  if (!kibibytes)
    throw SessionError(
        fmt::format("{} has no line MemAvailable, so the available memory is unknown", meminfo.string()));
  MemoryAvailable available{*kibibytes * 1024, fmt::format("MemAvailable of {}", meminfo.string())};
  visit_groups(root, "memory", [&](const fs::path& folder, bool unified) {
    const auto& controller = unified ? v2 : v1;
    if (const auto left = left_in(folder, controller); left && *left < available.bytes)
      available = {*left, (folder / controller.limit).string()};
  });
  return available;
}

OomKills oom_kills(const fs::path& root) {
  OomKills found;
  const auto look_in = [&found](const fs::path& file) {
    const auto count = number_after(read_proc(file).value_or(""), "oom_kill ");
    if (count && found.counted_by.empty()) found = {*count, file.string()};
  };
  // From the process's own group upwards. In a container its path may be that of the machine outside.
  visit_groups(root, "memory", [&](const fs::path& folder, bool unified) {
    look_in(folder / (unified ? "memory.events" : "memory.oom_control"));
  });
  look_in(root / "proc/vmstat");
  return found;
}

void be_killed_first() noexcept {
  constexpr std::uint64_t more = 500, most = 1000;  // In units of 1/1000 of the memory.
  const auto file = "/proc/self/oom_score_adj";
  const base::UniqueFd fd(open(file, O_WRONLY | O_CLOEXEC));
  if (!fd) return;
  // A negative one says that this process is to be spared.
  const auto score = leading_number(read_proc(file).value_or("")).value_or(most);
  if (score >= most) return;
  const auto text = std::to_string(std::min(score + more, most));
  if (write(fd.get(), text.data(), text.size()) < 0) return;  // Then it is killed like any other.
}

}  // namespace accelmgr::ipc
