// The steps of resolve(), in their order. Each reads the options, the machine and what earlier steps decided,
// writes its part of the plan, and throws ConfigError.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/devices.hpp"
#include "launch/plan.hpp"

namespace accelmgr::launch {

struct Resolution {
  const Options& options;
  const Machine& machine;
  Plan plan = {};
  const DeviceKind* kind = nullptr;
  std::string worker_source = {};  ///< Of the worker hosts: "option workers", "environment ACCELMGR_WORKERS".

  /// A variable of the environment; empty when it is not set, or empty.
  std::string variable(const char* name) const;
  /// As above; empty also in a process that was launched itself: those which it has say who it is, not what
  /// it shall launch.
  std::string environment_of_hosts(const char* name) const;
  void from(const std::string& field, const std::string& source) { plan.sources[field] = source; }
  void warn(std::string sentence) { plan.warnings.push_back(std::move(sentence)); }
};

inline constexpr const char* from_option = "option";
inline constexpr int most_processes = 4096;  ///< Of a host.
inline constexpr int most_hosts = 65536;

[[noreturn]] void refuse(const std::string& key, const std::string& what);

void check_values(const Options& options);
void read_worker_form(Resolution& r);        ///< worker_form, worker_hosts, configured_devices
void choose_device(Resolution& r);           ///< kind, device
void choose_nprocs(Resolution& r);           ///< nprocs
void choose_hosts(Resolution& r);            ///< nnodes, node_rank, world_size, rank_offset, ips, master_*
void choose_backend(Resolution& r);          ///< backend
void choose_visible_devices(Resolution& r);  ///< visible_devices
void choose_workers(Resolution& r);          ///< workers, local_worker, endpoints, service_address

/// The devices of this kind that processes of this environment see, by absolute id.
std::vector<std::string> visible_devices(const DeviceKind& kind, const Machine& machine);
/// Where that comes from: "environment CUDA_VISIBLE_DEVICES", "default: 4 GPUs".
std::string visible_source(const DeviceKind& kind, const Machine& machine);

/// Which of `hosts`, addresses or names, this machine is. Throws ConfigError, which lists both, when none or
/// more than one is.
int own_place(const std::vector<std::string>& hosts, const Machine& machine, const std::string& key);

}  // namespace accelmgr::launch
