// The environment variables by which a launched process knows who it is. Those without our prefix are what
// torchrun sets, and what every program of the field reads.
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
/// A path by which the ranks of this host open their world's memory: /proc/PID/fd/N of whoever launched them.
inline constexpr const char* world_memory = "ACCELMGR_WORLD_MEMORY";

}  // namespace accelmgr::launch::variable
