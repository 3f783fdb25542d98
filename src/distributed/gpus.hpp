// The GPUs that a launch on this host could use.
#pragma once

namespace accelmgr::distributed {

/// The number of GPUs that CUDA_VISIBLE_DEVICES leaves visible. Uses no device library.
int visible_gpus();

}  // namespace accelmgr::distributed
