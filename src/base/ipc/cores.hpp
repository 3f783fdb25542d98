// The cores that this process may use.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace accelmgr::ipc {

struct Cores {
  int count = 1;
  std::string limit;  ///< What limits their number: "affinity", "the cgroup's CPU quota of 1.5 cores (PATH)"
};

/// The cores on which the calling thread may run, or fewer if the control groups of this process may use no
/// more CPU time. Reads files. `root` has /proc and /sys, for tests.
Cores cores(const std::filesystem::path& root = "/");
int allowed_cores();

/// The number of threads with which OpenMP computes in each process, if OMP_NUM_THREADS says so.
std::optional<int> openmp_threads();

}  // namespace accelmgr::ipc
