// The steps of resolve(), in their order. Each reads the options, the machine and the results of earlier
// steps, and writes its part of the launch spec. Invalid values throw ConfigError.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launcher/launch/plan/devices.hpp"
#include "launcher/launch/plan/launch_spec.hpp"

namespace accelmgr::launch {

struct Resolution {
  const Options& options;
  const NodeInfo& node_info;
  LaunchSpec spec = {};
  const DeviceKind* kind = nullptr;
  std::string worker_source = {};  ///< Of worker_nodes: "option workers", "environment ACCELMGR_WORKERS".

  /// A variable of the environment; empty if it is not set.
  std::string variable(const char* name) const;
  /// As variable(), but always empty in a process that was launched itself: there these variables identify
  /// the process and do not describe a new launch.
  std::string environment_of_nodes(const char* name) const;
  void from(const std::string& field, const std::string& source) { spec.sources[field] = source; }
  void warn(std::string sentence) { spec.warnings.push_back(std::move(sentence)); }
};

inline constexpr const char* from_option = "option";
inline constexpr int most_processes = 4096;  ///< On one node.
inline constexpr int most_nodes = 65536;

[[noreturn]] void refuse(const std::string& key, const std::string& what);

void check_values(const Options& options);
void read_worker_form(Resolution& r);        ///< worker_form, worker_nodes, configured_devices
void choose_device(Resolution& r);           ///< kind, device
void choose_nprocs(Resolution& r);           ///< nprocs
void choose_nodes(Resolution& r);            ///< nnodes, node_rank, world_size, rank_offset, ips, master_*
void choose_backend(Resolution& r);          ///< backend
void choose_visible_devices(Resolution& r);  ///< visible_devices
void choose_workers(Resolution& r);          ///< workers, local_worker, endpoints, service_address

/// Absolute ids of the devices of this kind that a process with node_info.environment sees.
std::vector<std::string> visible_devices(const DeviceKind& kind, const NodeInfo& node_info);
/// The source of visible_devices(): "environment CUDA_VISIBLE_DEVICES", "default: 4 GPUs".
std::string visible_source(const DeviceKind& kind, const NodeInfo& node_info);

/// The index of this node in `nodes` (addresses or names). Throws ConfigError, which lists the nodes and
/// this node's addresses, if none or several of them match.
int own_place(const std::vector<std::string>& nodes, const NodeInfo& node_info, const std::string& key);

}  // namespace accelmgr::launch
