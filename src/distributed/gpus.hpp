// GPUs that a process launched here could use.
#pragma once

namespace accelmgr::distributed {

/// As CUDA_VISIBLE_DEVICES leaves them; no device library is asked.
int visible_gpus();

}  // namespace accelmgr::distributed
