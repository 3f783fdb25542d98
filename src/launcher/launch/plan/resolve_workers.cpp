// Reads the worker strings and chooses the addresses of the processes.
#include <fmt/format.h>

#include <utility>

#include "base/parse_number.hpp"
#include "launcher/launch/compat/variables.hpp"
#include "launcher/launch/plan/resolution.hpp"

namespace accelmgr::launch {
namespace {

void read_worker_nodes(Resolution& r) {
  const auto take = [&](WorkerList list, std::string source) {
    r.spec.xla.form = list.form;
    r.spec.xla.nodes = std::move(list.nodes);
    r.worker_source = std::move(source);
  };
  if (!r.options.workers.empty()) return take(parse_workers(r.options.workers), "option workers");
  for (const char* name : {variable::tpu_config, variable::workers}) {
    const auto value = r.environment_of_nodes(name);
    if (value.empty()) continue;
    const auto source = fmt::format("environment {}", name);
    try {
      if (name == variable::tpu_config)
        return take({WorkerForm::tpu, parse_workers(value, WorkerForm::tpu)}, source);
      return take(parse_workers(value), source);
    } catch (const ConfigError& error) {
      refuse("workers", fmt::format("{}: {}", source, error.what()));
    }
  }
}

// Without worker strings, other variables of the environment can choose the form.
void read_form_of_environment(Resolution& r) {
  for (const auto& [name, form] : {std::pair(variable::tpu_num_devices, WorkerForm::tpu),
                                   std::pair(variable::gpu_num_devices, WorkerForm::worker),
                                   std::pair(variable::local_worker, WorkerForm::worker)}) {
    if (r.environment_of_nodes(name).empty()) continue;
    r.spec.xla.form = form;
    r.worker_source = fmt::format("environment {}", name);
    return;
  }
}

void read_configured_devices(Resolution& r) {
  const bool is_tpu = r.spec.xla.form == WorkerForm::tpu;
  const char* name = is_tpu ? variable::tpu_num_devices : variable::gpu_num_devices;
  const auto value = r.environment_of_nodes(name);
  if (value.empty()) {
    r.spec.xla.devices = is_tpu ? tpu_devices : 0;
    return r.from("configured_devices", is_tpu ? "default: the TPU form" : "default: none");
  }
  const auto count = base::parse_number<int>(value);
  if (!count || *count < 1 || *count > most_processes)
    refuse("nprocs", fmt::format("environment {} is '{}'; it must be a number of devices, from 1 to {}", name,
                                 value, most_processes));
  r.spec.xla.devices = *count;
  r.from("configured_devices", fmt::format("environment {}", name));
}

// The name of this node: from the environment, otherwise its entry in the worker string.
void choose_local_worker(Resolution& r) {
  auto& spec = r.spec;
  spec.xla.local_worker = r.environment_of_nodes(variable::local_worker);
  if (!spec.xla.local_worker.empty()) {
    parse_local_worker(
        spec.xla.local_worker);  // Only a check: with the option node_rank it is not read before.
    return;
  }
  if (spec.xla.nodes.empty())
    refuse("workers",
           fmt::format("{} is set, but it is not known which worker this node is; set workers, {} or {}",
                       r.worker_source, variable::tpu_config, variable::local_worker));
  const auto& node = spec.xla.nodes.at(static_cast<std::size_t>(spec.node_rank));
  spec.xla.local_worker = fmt::format("{}:{}", node.name, node.ordinal);
}

void choose_service_address(Resolution& r) {
  auto& spec = r.spec;
  const auto configured = r.environment_of_nodes(variable::service_address);
  const auto variable_name = fmt::format("environment {}", variable::service_address);
  if (!configured.empty()) {
    try {
      spec.xla.service_address = text(ipc::parse_host_port(configured));
    } catch (const ConfigError& error) {
      refuse("workers", fmt::format("{}: {}", variable_name, error.what()));
    }
    return r.from("service_address", variable_name);
  }
  if (spec.nprocs == 1) return r.from("service_address", "default: not needed for one process");
  if (spec.nnodes == 1) return r.from("service_address", "default: none is bound yet");
  spec.xla.service_address = text(ipc::HostPort{spec.master_addr, spec.master_port});
  r.from("service_address", "master_addr, master_port");
}

// Endpoints are set only if every address is known and the ports of each node are consecutive.
void choose_endpoints(Resolution& r) {
  auto& spec = r.spec;
  if (!spec.xla.workers.empty()) {
    for (const auto& worker : spec.xla.workers) spec.endpoints.push_back(text(worker.address));
    return r.from("endpoints", "workers");
  }
  auto nodes = spec.ips;
  if (nodes.empty() && spec.nnodes == 1) nodes.push_back(spec.master_addr);
  const bool known = spec.master_port > 0 && static_cast<int>(nodes.size()) == spec.nnodes &&
                     spec.world_size == spec.nnodes * spec.nprocs &&
                     spec.master_port + spec.nprocs - 1 <= ipc::highest_port;
  if (!known) return r.from("endpoints", "default: none is known");
  for (const auto& node : nodes)
    for (int i = 0; i < spec.nprocs; ++i)
      spec.endpoints.push_back(text(ipc::HostPort{node, spec.master_port + i}));
  r.from("endpoints", "ips, master_port");
}

}  // namespace

std::string Resolution::environment_of_nodes(const char* name) const {
  return variable(variable::ordinal).empty() ? variable(name) : "";
}

void read_worker_form(Resolution& r) {
  read_worker_nodes(r);
  if (r.spec.xla.form == WorkerForm::none) read_form_of_environment(r);
  r.from("worker_form", r.spec.xla.form == WorkerForm::none ? "default" : r.worker_source);
  if (r.spec.xla.form != WorkerForm::none) read_configured_devices(r);
}

void choose_workers(Resolution& r) {
  auto& spec = r.spec;
  r.from("workers", "default: none");
  r.from("service_address", "default: none");
  if (!spec.xla.nodes.empty()) r.from("workers", r.worker_source);
  if (spec.xla.form == WorkerForm::worker) {
    spec.xla.workers = expand_workers(spec.xla.nodes, spec.nprocs);
    if (spec.xla.workers.empty()) r.from("workers", "default: none is bound yet");
  }
  if (spec.xla.form == WorkerForm::tpu) choose_local_worker(r);
  if (spec.xla.form != WorkerForm::none) choose_service_address(r);
  choose_endpoints(r);
}

}  // namespace accelmgr::launch
