// libtorch's part for CUDA. Programs do not link it: a process that does not call load_cuda() has neither
// that library nor a context of a GPU.
#pragma once

#include "accelmgr/config.hpp"
#include "base/cuda/nccl.hpp"
#include "base/cuda/runtime.hpp"

namespace accelmgr::libtorch {

/// Loads libtorch's part for CUDA, from the folder of the libtorch that this process has, and initializes it.
/// Call it before anything else asks torch for GPUs: torch remembers what it finds then. Throws ConfigError
/// (runners.device) if this libtorch has no such part, or if no GPU can be used.
void load_cuda();

/// The table of the CUDA runtime that libtorch uses. Throws ConfigError.
device::Runtime cuda_runtime();

/// The table of the NCCL that comes with libtorch, or of the system's. Throws UsageError.
device::Nccl nccl();

}  // namespace accelmgr::libtorch
