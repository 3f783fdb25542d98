// The environment variables that identify a launched process. Those without the prefix ACCELMGR_ are set by
// torchrun too, and common programs read them. Those of torch_xla and paddle are in launch/compat.
#pragma once

namespace accelmgr::launch::variable {

inline constexpr const char* rank = "RANK";
inline constexpr const char* local_rank = "LOCAL_RANK";
inline constexpr const char* world_size = "WORLD_SIZE";
inline constexpr const char* local_world_size = "LOCAL_WORLD_SIZE";
inline constexpr const char* node_rank = "GROUP_RANK";
inline constexpr const char* node_count = "GROUP_WORLD_SIZE";
inline constexpr const char* master_addr = "MASTER_ADDR";
inline constexpr const char* master_port = "MASTER_PORT";

inline constexpr const char* backend = "ACCELMGR_LAUNCH_BACKEND";  ///< Resolved: shm, gloo, nccl.
inline constexpr const char* timeout = "ACCELMGR_LAUNCH_TIMEOUT";  ///< Seconds, of collectives.
inline constexpr const char* interface = "ACCELMGR_LAUNCH_INTERFACE";
/// The path by which the ranks of this node open their world's memory: /proc/PID/fd/N of the launching
/// process.
inline constexpr const char* world_memory = "ACCELMGR_WORLD_MEMORY";
/// Likewise, the path of the memory of SerialExecutor (serial_memory.hpp).
inline constexpr const char* serial_memory = "ACCELMGR_SERIAL_MEMORY";

// The variables of torchrun's agent. A child does not inherit those of the launch around this one; the agent
// of `accelmgr spawn` sets its own (launcher/agent).
inline constexpr const char* agent_store = "TORCHELASTIC_USE_AGENT_STORE";
inline constexpr const char* error_file = "TORCHELASTIC_ERROR_FILE";
inline constexpr const char* restart_count = "TORCHELASTIC_RESTART_COUNT";

inline constexpr const char* omp_num_threads = "OMP_NUM_THREADS";

}  // namespace accelmgr::launch::variable
