#include "base/ipc/cores.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

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

/// The numbers of a file; `max` and what is no number is infinite.
std::vector<double> numbers_in(const fs::path& path) {
  std::ifstream file(path);
  std::vector<double> numbers;
  for (std::string word; file >> word;) {
    char* end = nullptr;
    const double number = std::strtod(word.c_str(), &end);
    numbers.push_back(*end == 0 && number >= 0 ? number : std::numeric_limits<double>::infinity());
  }
  return numbers;
}

/// The least quota of a group and of those that it is in. A container may see its own group as the root.
Quota quota_of(const fs::path& hierarchy, fs::path group, bool unified) {
  Quota least;
  for (;; group = group.parent_path()) {
    const auto folder = hierarchy / group.relative_path();
    const auto file = folder / (unified ? "cpu.max" : "cpu.cfs_quota_us");
    auto numbers = numbers_in(file);
    if (!unified)
      if (const auto period = numbers_in(folder / "cpu.cfs_period_us"); !period.empty())
        numbers.push_back(period.front());
    if (numbers.size() == 2 && numbers[1] > 0 && numbers[0] / numbers[1] < least.cores)
      least = {numbers[0] / numbers[1], file};
    if (group.relative_path().empty()) return least;
  }
}

Quota quota(const fs::path& root) {
  Quota least;
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/a/b", or "4:cpu,cpuacct:/a/b"
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const auto controllers = line.substr(first + 1, second - first - 1);
    const auto base = root / "sys/fs/cgroup";
    Quota found;
    if (controllers.empty())
      found = quota_of(base, line.substr(second + 1), true);
    else if (("," + controllers + ",").find(",cpu,") != std::string::npos)
      found = quota_of(base / controllers, line.substr(second + 1), false);
    if (found.cores < least.cores) least = found;
  }
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
