// The environment variables that identify a launched process. Those without the prefix ACCELMGR_ are set by
// torchrun too, and common programs read them.
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
/// The path by which the ranks of this host open their world's memory: /proc/PID/fd/N of the launching
/// process.
inline constexpr const char* world_memory = "ACCELMGR_WORLD_MEMORY";
/// Likewise, the path of the memory of SerialExecutor (serial_memory.hpp).
inline constexpr const char* serial_memory = "ACCELMGR_SERIAL_MEMORY";

// The variables of torch_xla, renamed. In the environment of the launching process the first group describes
// the launch, and world size is the number of hosts.
inline constexpr const char* xla_world_size = "ACCELMGR_WORLD_SIZE";
inline constexpr const char* local_worker = "ACCELMGR_LOCAL_WORKER";  ///< name:ordinal
inline constexpr const char* workers = "ACCELMGR_WORKERS";
inline constexpr const char* gpu_num_devices = "ACCELMGR_GPU_NUM_DEVICES";
inline constexpr const char* tpu_config = "ACCELMGR_TPU_CONFIG";
inline constexpr const char* tpu_num_devices = "ACCELMGR_TPU_NUM_DEVICES";
inline constexpr const char* service_address = "ACCELMGR_SERVICE_ADDRESS";  ///< HOST:PORT

inline constexpr const char* ordinal = "ACCELMGR_ORDINAL";
inline constexpr const char* local_ordinal = "ACCELMGR_LOCAL_ORDINAL";
inline constexpr const char* mp_device = "ACCELMGR_MP_DEVICE";  ///< "GPU:3"
inline constexpr const char* device_map = "ACCELMGR_DEVICE_MAP";

// Descriptor numbers, in the launched process, of sockets that listen already: on the port of the local
// worker and on that of the service address.
inline constexpr const char* worker_socket = "ACCELMGR_WORKER_SOCKET";
inline constexpr const char* service_socket = "ACCELMGR_SERVICE_SOCKET";
inline constexpr int worker_socket_number = 50;
inline constexpr int service_socket_number = 51;

// The variables of paddle, renamed.
inline constexpr const char* trainer_id = "ACCELMGR_TRAINER_ID";
inline constexpr const char* trainers_num = "ACCELMGR_TRAINERS_NUM";
inline constexpr const char* current_endpoint = "ACCELMGR_CURRENT_ENDPOINT";
inline constexpr const char* trainer_endpoints = "ACCELMGR_TRAINER_ENDPOINTS";
inline constexpr const char* selected_gpus = "ACCELMGR_SELECTED_GPUS";
inline constexpr const char* selected_xpus = "ACCELMGR_SELECTED_XPUS";
inline constexpr const char* selected_customs = "ACCELMGR_SELECTED_CUSTOMS";
// Not renamed: programs read these too.
inline constexpr const char* flag_gpus = "FLAGS_selected_gpus";
inline constexpr const char* flag_xpus = "FLAGS_selected_xpus";

// The variables of torchrun's agent. A child does not inherit them: they speak of the launch around this one.
inline constexpr const char* agent_store = "TORCHELASTIC_USE_AGENT_STORE";
inline constexpr const char* error_file = "TORCHELASTIC_ERROR_FILE";

inline constexpr const char* omp_num_threads = "OMP_NUM_THREADS";

}  // namespace accelmgr::launch::variable
