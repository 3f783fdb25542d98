// The CUDA device of a rank, where torch was built with CUDA.
#pragma once

#include <optional>

namespace accelmgr::distributed {

/// The local rank modulo the number of devices that torch sees in this process. A process that sees one GPU
/// thus uses device 0, whatever its local rank. nullopt if torch sees none.
std::optional<int> cuda_device(int local_rank);

/// Makes cuda_device() the current device of this thread; does nothing if there is none. Throws SessionError,
/// which names the device.
void use_cuda_device(int local_rank);

}  // namespace accelmgr::distributed
