#include "launcher/launch/plan/compat_environment.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "launcher/launch/compat/variables.hpp"
#include "launcher/launch/plan/devices.hpp"

namespace accelmgr::launch {
namespace {

using Environment = std::map<std::string, std::string>;

void set_worker_form(Environment& child, const LaunchSpec& spec, int local_index) {
  const int rank = spec.rank(local_index);
  child[variable::local_worker] = fmt::format("{}:{}", local_worker_name, rank);
  if (spec.xla.workers.empty()) return;
  child[variable::workers] = text(spec.xla.workers, WorkerForm::worker);
  child[variable::device_map] = device_map(spec.xla.workers, device_kind(spec.device).label);
  if (spec.xla.workers_bound) child[variable::worker_socket] = std::to_string(variable::worker_socket_number);
}

// Only rank 0 gets the configuration: a process that has it sets up the mesh, and one must do it.
void set_tpu_form(Environment& child, const LaunchSpec& spec, int local_index) {
  child[variable::local_worker] = spec.xla.local_worker;
  if (spec.rank(local_index) > 0) return;
  if (!spec.xla.nodes.empty()) child[variable::tpu_config] = text(spec.xla.nodes, WorkerForm::tpu);
  child[variable::tpu_num_devices] = std::to_string(spec.xla.devices);
}

}  // namespace

void set_torch_xla(Environment& child, const LaunchSpec& spec, int local_index) {
  child[variable::ordinal] = std::to_string(spec.rank(local_index));
  child[variable::local_ordinal] = std::to_string(local_index);
  child[variable::xla_world_size] = std::to_string(spec.world_size);
  if (spec.xla.form == WorkerForm::worker) set_worker_form(child, spec, local_index);
  if (spec.xla.form == WorkerForm::tpu) set_tpu_form(child, spec, local_index);
  if (!spec.xla.service_address.empty()) child[variable::service_address] = spec.xla.service_address;
  if (spec.xla.service_bound && local_index == 0)
    child[variable::service_socket] = std::to_string(variable::service_socket_number);
}

void set_paddle(Environment& child, const LaunchSpec& spec, int local_index) {
  child[variable::trainer_id] = std::to_string(spec.rank(local_index));
  child[variable::trainers_num] = std::to_string(spec.world_size);
  if (spec.endpoints.empty()) return;
  child[variable::current_endpoint] = spec.endpoints.at(static_cast<std::size_t>(spec.rank(local_index)));
  child[variable::trainer_endpoints] = fmt::format("{}", fmt::join(spec.endpoints, ","));
}

}  // namespace accelmgr::launch
