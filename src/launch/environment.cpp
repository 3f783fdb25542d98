#include "launch/environment.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "launch/devices.hpp"
#include "launch/variables.hpp"

namespace accelmgr::launch {
namespace {

using Environment = std::map<std::string, std::string>;

// Connections between the ranks must not be taken to a proxy.
constexpr const char* proxies[] = {"http_proxy", "https_proxy"};

void set_ranks(Environment& child, const Plan& plan, int local_index) {
  child[variable::rank] = std::to_string(plan.rank(local_index));
  child[variable::local_rank] = std::to_string(local_index);
  child[variable::world_size] = std::to_string(plan.world_size);
  child[variable::local_world_size] = std::to_string(plan.nprocs);
  child[variable::node_rank] = std::to_string(plan.node_rank);
  child[variable::node_count] = std::to_string(plan.nnodes);
  child[variable::master_addr] = plan.master_addr;
  if (plan.master_port > 0) child[variable::master_port] = std::to_string(plan.master_port);
  child[variable::backend] = plan.backend;
  child[variable::timeout] = fmt::format("{}", plan.timeout_s);
}

void set_device(Environment& child, const Plan& plan, int local_index) {
  const auto& kind = device_kind(plan.device);
  const auto label = plan.worker_form == WorkerForm::tpu ? "TPU" : kind.label;
  child[variable::mp_device] = fmt::format("{}:{}", label, plan.rank(local_index));
  if (plan.visible_devices.empty()) return;
  const auto& id = plan.visible_devices.at(static_cast<std::size_t>(local_index));
  child[kind.visible] = id;
  child[kind.selected] = id;
}

void set_worker_form(Environment& child, const Plan& plan, int local_index) {
  const int rank = plan.rank(local_index);
  const auto name = plan.workers.empty() ? std::string(local_worker_name)
                                         : plan.workers.at(static_cast<std::size_t>(rank)).name;
  child[variable::local_worker] = fmt::format("{}:{}", name, rank);
  if (plan.workers.empty()) return;
  child[variable::workers] = text(plan.workers, WorkerForm::worker);
  child[variable::device_map] = device_map(plan.workers, device_kind(plan.device).label);
  if (plan.workers_bound) child[variable::worker_socket] = std::to_string(variable::worker_socket_number);
}

// Only the first process of all sets up the mesh; the others would, too, if they had the configuration.
void set_tpu_form(Environment& child, const Plan& plan, int local_index) {
  child[variable::local_worker] = plan.local_worker;
  if (plan.rank(local_index) > 0) return;
  if (!plan.worker_hosts.empty()) child[variable::tpu_config] = text(plan.worker_hosts, WorkerForm::tpu);
  child[variable::tpu_num_devices] = std::to_string(plan.configured_devices);
}

void set_workers(Environment& child, const Plan& plan, int local_index) {
  child[variable::ordinal] = std::to_string(plan.rank(local_index));
  child[variable::local_ordinal] = std::to_string(local_index);
  child[variable::xla_world_size] = std::to_string(plan.world_size);
  if (plan.worker_form == WorkerForm::worker) set_worker_form(child, plan, local_index);
  if (plan.worker_form == WorkerForm::tpu) set_tpu_form(child, plan, local_index);
  if (!plan.service_address.empty()) child[variable::service_address] = plan.service_address;
  if (plan.service_bound && local_index == 0)
    child[variable::service_socket] = std::to_string(variable::service_socket_number);
}

void set_trainer(Environment& child, const Plan& plan, int local_index) {
  child[variable::trainer_id] = std::to_string(plan.rank(local_index));
  child[variable::trainers_num] = std::to_string(plan.world_size);
  if (plan.endpoints.empty()) return;
  child[variable::current_endpoint] = plan.endpoints.at(static_cast<std::size_t>(plan.rank(local_index)));
  child[variable::trainer_endpoints] = fmt::format("{}", fmt::join(plan.endpoints, ","));
}

}  // namespace

const std::vector<std::string>& launch_variables() {
  using namespace variable;
  static const std::vector<std::string> all = {
      // clang-format off
      rank, local_rank, variable::world_size, local_world_size, node_rank, node_count, master_addr, master_port,
      backend, timeout, world_memory, serial_memory,
      xla_world_size, local_worker, workers, gpu_num_devices, tpu_config, tpu_num_devices, service_address,
      ordinal, local_ordinal, mp_device, variable::device_map, worker_socket, service_socket,
      trainer_id, trainers_num, current_endpoint, trainer_endpoints, selected_gpus, selected_xpus, selected_customs,
      agent_store, error_file,
      // clang-format on
  };
  return all;
}

Environment child_environment(const Plan& plan, int local_index, const Machine& machine) {
  auto child = machine.environment;
  for (const char* proxy : proxies) child.erase(proxy);
  for (const auto& name : launch_variables()) child.erase(name);
  set_ranks(child, plan, local_index);
  set_device(child, plan, local_index);
  set_workers(child, plan, local_index);
  set_trainer(child, plan, local_index);
  child.emplace(variable::omp_num_threads, std::to_string(std::max(1, machine.cores / plan.nprocs)));
  for (const auto& [name, value] : plan.environment) child[name] = value;
  return child;
}

}  // namespace accelmgr::launch
