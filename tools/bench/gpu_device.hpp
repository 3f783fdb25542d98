// The GPU that a benchmark runs on.
#pragma once

#include <string>

#include "base/cuda/runtime.hpp"

namespace accelmgr::bench {

struct Gpu {
  device::Runtime runtime;
  std::string name;     ///< "fake" is no GPU: its figures say nothing.
  int driver_version;   ///< The newest CUDA that the driver has, as 1000 * major + 10 * minor.
  int runtime_version;  ///< Of the library, in the same form.
  bool is_fake() const { return name == "fake"; }
};

/// Loads CUDA's runtime. Throws UsageError if there is none, or no GPU.
Gpu open_gpu();

}  // namespace accelmgr::bench
