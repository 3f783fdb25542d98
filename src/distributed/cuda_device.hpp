// Which CUDA device a rank computes on, where torch was built with CUDA.
#pragma once

#include <c10/core/Device.h>

#include <optional>

namespace accelmgr::distributed {

/// Of those that torch sees in this process, in turn: a process that was left one GPU has number 0, whatever
/// its local rank. nullopt: torch sees none.
std::optional<at::Device> cuda_device(int local_rank);

/// Makes it the current one of this thread; nothing where there is none. Throws SessionError, which names it.
void use_cuda_device(int local_rank);

}  // namespace accelmgr::distributed
