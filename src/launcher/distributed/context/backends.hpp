// The backends that a context or a group can ask for.
#pragma once

#include <string>
#include <vector>

namespace accelmgr::distributed {

/// "auto": shm on one node, gloo over several. It is accepted, but available_backends() does not list it.
inline constexpr const char* auto_backend = "auto";
/// Tensors on GPUs go over NCCL; what is in CPU memory goes as with "auto".
inline constexpr const char* nccl_backend = "nccl";

/// The number of GPUs that CUDA_VISIBLE_DEVICES leaves visible. Uses no device library.
int visible_gpus();

/// Throws ConfigError if the backend is unknown (the text lists the usable ones and the nearest) or cannot be
/// used here (the text says why).
void check_backend(const std::string& backend);

}  // namespace accelmgr::distributed
