#include <fmt/format.h>

#include <optional>
#include <sstream>
#include <string_view>

#include "accelmgr/errors.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/proc_file.hpp"

namespace accelmgr::ipc {
namespace {

namespace fs = std::filesystem;

/// The names of the same files in the two versions of control groups.
struct Controller {
  const char* mount;
  const char* limit;
  const char* usage;
  // A line of memory.stat: the file pages that the kernel drops first. Shared memory is not among them.
  const char* reclaimable;
};
constexpr Controller v1{"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                        "total_inactive_file "};
constexpr Controller v2{"sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "};

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

/// Lowers `available` to what the limits of `group` (a path below the mount, as in /proc/self/cgroup) and of
/// its ancestors leave. In a container the path may be that of the host machine, which does not exist here:
/// then only the files of the mount itself count, which is the last ancestor.
void limit_by(const fs::path& mount, fs::path group, const Controller& controller,
              MemoryAvailable& available) {
  for (group = group.relative_path();; group = group.parent_path()) {
    const auto folder = group.empty() ? mount : mount / group;
    if (const auto left = left_in(folder, controller); left && *left < available.bytes)
      available = {*left, (folder / controller.limit).string()};
    if (group.empty()) return;
  }
}

/// Applies the limits of a line of /proc/self/cgroup: "hierarchy:controllers:path"; for version 2 "0::path".
void limit_by_line(const fs::path& root, std::string_view line, MemoryAvailable& available) {
  const auto first = line.find(':');
  const auto second = line.find(':', first + 1);
  if (first == std::string_view::npos || second == std::string_view::npos) return;
  const auto controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
  const fs::path group(line.substr(second + 1));
  if (line.starts_with("0::")) limit_by(root / v2.mount, group, v2, available);
  if (controllers.find(",memory,") != std::string::npos) limit_by(root / v1.mount, group, v1, available);
}

}  // namespace

MemoryAvailable memory_available(const fs::path& root) {
  const auto meminfo = root / "proc/meminfo";
  const auto kibibytes = number_after(read_proc(meminfo).value_or(""), "MemAvailable:");
  if (!kibibytes)
    throw SessionError(
        fmt::format("{} has no line MemAvailable, so the available memory is unknown", meminfo.string()));
  MemoryAvailable available{*kibibytes * 1024, fmt::format("MemAvailable of {}", meminfo.string())};
  std::istringstream groups(read_proc(root / "proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(groups, line);) limit_by_line(root, line, available);
  return available;
}

}  // namespace accelmgr::ipc
