#include "launcher/launch/plan/child_environment.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "launcher/launch/compat/variables.hpp"
#include "launcher/launch/plan/compat_environment.hpp"
#include "launcher/launch/plan/devices.hpp"
#include "launcher/launch/plan/variables.hpp"

namespace accelmgr::launch {
namespace {

using Environment = std::map<std::string, std::string>;

// Connections between the ranks must not go through a proxy.
constexpr const char* proxies[] = {"http_proxy", "https_proxy"};

void set_ranks(Environment& child, const LaunchSpec& spec, int local_index) {
  child[variable::rank] = std::to_string(spec.rank(local_index));
  child[variable::local_rank] = std::to_string(local_index);
  child[variable::world_size] = std::to_string(spec.world_size);
  child[variable::local_world_size] = std::to_string(spec.nprocs);
  child[variable::node_rank] = std::to_string(spec.node_rank);
  child[variable::node_count] = std::to_string(spec.nnodes);
  child[variable::master_addr] = spec.master_addr;
  if (spec.master_port > 0) child[variable::master_port] = std::to_string(spec.master_port);
  child[variable::backend] = spec.backend;
  if (!spec.interface.empty()) child[variable::interface] = spec.interface;
  child[variable::timeout] = fmt::format("{}", spec.timeout_s);
}

/// The devices that a process sees. In the worker form (torch_xla) it sees its own alone, as its first one.
/// Otherwise it sees those of all processes of this node, in their order: programs for torchrun, ignite and
/// paddle compute on the device with the number of their local rank.
std::vector<std::string> seen_devices(const LaunchSpec& spec, const std::string& own) {
  if (spec.xla.form == WorkerForm::worker) return {own};
  std::vector<std::string> seen;
  for (const auto& id : spec.visible_devices)
    if (std::ranges::find(seen, id) == seen.end()) seen.push_back(id);
  return seen;
}

void set_device(Environment& child, const LaunchSpec& spec, int local_index) {
  const auto& kind = device_kind(spec.device);
  const auto label = spec.xla.form == WorkerForm::tpu ? "TPU" : kind.label;
  child[variable::mp_device] = fmt::format("{}:{}", label, spec.rank(local_index));
  if (spec.visible_devices.empty()) return;
  const auto& own = spec.visible_devices.at(static_cast<std::size_t>(local_index));
  const auto seen = seen_devices(spec, own);
  child[kind.visible] = fmt::format("{}", fmt::join(seen, ","));
  child[kind.selected] = own;
  if (!kind.flag.empty()) child[kind.flag] = std::to_string(std::ranges::find(seen, own) - seen.begin());
}

}  // namespace

const std::vector<std::string>& launch_variables() {
  using namespace variable;
  static const std::vector<std::string> all = {
      // clang-format off
      rank, local_rank, variable::world_size, local_world_size, node_rank, node_count, master_addr, master_port,
      backend, interface, timeout, world_memory, serial_memory,
      xla_world_size, local_worker, workers, gpu_num_devices, tpu_config, tpu_num_devices, service_address,
      ordinal, local_ordinal, mp_device, variable::device_map, worker_socket, service_socket,
      trainer_id, trainers_num, current_endpoint, trainer_endpoints, selected_gpus, selected_xpus, selected_customs,
      flag_gpus, flag_xpus,
      agent_store, error_file,
      // clang-format on
  };
  return all;
}

Environment child_environment(const LaunchSpec& spec, int local_index, const NodeInfo& node_info) {
  auto child = node_info.environment;
  for (const char* proxy : proxies) child.erase(proxy);
  for (const auto& name : launch_variables()) child.erase(name);
  set_ranks(child, spec, local_index);
  set_device(child, spec, local_index);
  set_torch_xla(child, spec, local_index);
  set_paddle(child, spec, local_index);
  child.emplace(variable::omp_num_threads, std::to_string(std::max(1, node_info.cores / spec.nprocs)));
  for (const auto& [name, value] : spec.environment) child[name] = value;
  return child;
}

}  // namespace accelmgr::launch
