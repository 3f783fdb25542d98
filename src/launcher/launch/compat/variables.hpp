// The environment variables by which torch_xla and paddle identify a launched process. They are renamed, but
// for those that programs read.
#pragma once

namespace accelmgr::launch::variable {

// The variables of torch_xla, renamed. In the environment of the launching process the first group describes
// the launch, and world size is the number of nodes.
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

}  // namespace accelmgr::launch::variable
