// Fills the table from CUDA's runtime library. Nothing links that library: a process that does not call
// load_cuda_runtime() never has it, and neither does a machine without CUDA.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "base/cuda/runtime.hpp"

namespace accelmgr::device {

/// The names and paths under which load_cuda_runtime() looks for the library, in this order:
///   - the library that this process has already, for instance because torch loaded it;
///   - torch's wheels, below each of `site_packages`;
///   - the toolkit: CUDA_HOME and CUDA_PATH, the folders of the dynamic linker, /usr/local/cuda.
/// CUDA 13 comes before CUDA 12.
std::vector<std::string> cuda_runtime_candidates(const std::vector<std::filesystem::path>& site_packages);

/// Loads the first candidate that is there. The library stays loaded. Throws UsageError, with the reason for
/// each candidate, if there is none or if a function is missing.
Runtime load_cuda_runtime(const std::vector<std::string>& candidates);

/// Loads this library, also where the process has another one. It stays loaded. Throws UsageError.
Runtime load_cuda_runtime_at(const std::string& path);

}  // namespace accelmgr::device
