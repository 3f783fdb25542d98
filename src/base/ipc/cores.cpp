#include "base/ipc/cores.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <sstream>

#include "base/ipc/control_groups.hpp"
#include "base/ipc/proc_file.hpp"

namespace accelmgr::ipc {
namespace {

namespace fs = std::filesystem;

// Grows the set, because the default size is too small on machines with more than 1024 cores.
int cores_of_affinity() {
  for (std::size_t cores = CPU_SETSIZE; cores <= (1u << 20); cores *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(cores),
                                                               [](cpu_set_t* s) { CPU_FREE(s); });
    const auto bytes = CPU_ALLOC_SIZE(cores);
    if (set != nullptr && ::sched_getaffinity(0, bytes, set.get()) == 0)
      return std::max(1, CPU_COUNT_S(bytes, set.get()));
  }
  return 1;
}

struct Quota {
  double cores = std::numeric_limits<double>::infinity();
  fs::path file;
};

/// The least quota of the control groups.
Quota quota(const fs::path& root) {
  Quota least;
  visit_groups(root, "cpu", [&](const fs::path& folder, bool unified) {
    const auto file = folder / (unified ? "cpu.max" : "cpu.cfs_quota_us");
    auto text = read_proc(file).value_or("");
    if (!unified) text += read_proc(folder / "cpu.cfs_period_us").value_or("");
    std::istringstream words(text);
    double quota = 0, period = 0;  // Without a quota: "max", or -1.
    if (words >> quota >> period && quota >= 0 && period > 0 && quota / period < least.cores)
      least = {quota / period, file};
  });
  return least;
}

}  // namespace

Cores cores(const std::filesystem::path& root) {
  const int allowed = cores_of_affinity();
  const auto least = quota(root);
  if (least.cores >= allowed) return {allowed, allowed < ::get_nprocs_conf() ? "affinity" : "the machine"};
  return {std::max(1, static_cast<int>(std::ceil(least.cores))),
          fmt::format("the cgroup's CPU quota of {:.3g} cores ({})", least.cores, least.file.string())};
}

int allowed_cores() { return cores().count; }

std::optional<int> openmp_threads() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  if (text == nullptr) return std::nullopt;
  const auto threads = leading_number(text);  // "4", or "4,2" for nested regions.
  return threads && *threads > 0 ? std::optional(static_cast<int>(*threads)) : std::nullopt;
}

}  // namespace accelmgr::ipc
