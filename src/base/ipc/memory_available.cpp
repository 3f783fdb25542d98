#include <fmt/format.h>

#include <optional>

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

}  // namespace accelmgr::ipc
