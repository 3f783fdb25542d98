// The worker strings, and what follows from them: who serves where.
#include <fmt/format.h>

#include <utility>

#include "launch/parse_number.hpp"
#include "launch/resolution.hpp"
#include "launch/variables.hpp"

namespace accelmgr::launch {
namespace {

void read_worker_hosts(Resolution& r) {
  const auto take = [&](WorkerList list, std::string source) {
    r.plan.worker_form = list.form;
    r.plan.worker_hosts = std::move(list.hosts);
    r.worker_source = std::move(source);
  };
  if (!r.options.workers.empty()) return take(parse_workers(r.options.workers), "option workers");
  for (const char* name : {variable::tpu_config, variable::workers}) {
    const auto value = r.environment_of_hosts(name);
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

// Without worker strings: other variables say that there are to be some.
void read_form_of_environment(Resolution& r) {
  for (const auto& [name, form] : {std::pair(variable::tpu_num_devices, WorkerForm::tpu),
                                   std::pair(variable::gpu_num_devices, WorkerForm::worker),
                                   std::pair(variable::local_worker, WorkerForm::worker)}) {
    if (r.environment_of_hosts(name).empty()) continue;
    r.plan.worker_form = form;
    r.worker_source = fmt::format("environment {}", name);
    return;
  }
}

void read_configured_devices(Resolution& r) {
  const bool is_tpu = r.plan.worker_form == WorkerForm::tpu;
  const char* name = is_tpu ? variable::tpu_num_devices : variable::gpu_num_devices;
  const auto value = r.environment_of_hosts(name);
  if (value.empty()) {
    r.plan.configured_devices = is_tpu ? tpu_devices : 0;
    return r.from("configured_devices", is_tpu ? "default: the TPU form" : "default: none");
  }
  const auto count = parse_number<int>(value);
  if (!count || *count < 1 || *count > most_processes)
    refuse("nprocs", fmt::format("environment {} is '{}'; it must be a number of devices, from 1 to {}", name,
                                 value, most_processes));
  r.plan.configured_devices = *count;
  r.from("configured_devices", fmt::format("environment {}", name));
}

// The host's own name; the first of the workers where the environment does not say it.
void choose_local_worker(Resolution& r) {
  auto& plan = r.plan;
  plan.local_worker = r.environment_of_hosts(variable::local_worker);
  if (!plan.local_worker.empty()) {
    parse_local_worker(plan.local_worker);  // Only checked: where node_rank is given, nobody has read it.
    return;
  }
  if (plan.worker_hosts.empty())
    refuse("workers", fmt::format("{}, but neither workers nor {} or {} say which worker this host is",
                                  r.worker_source, variable::tpu_config, variable::local_worker));
  const auto& host = plan.worker_hosts.at(static_cast<std::size_t>(plan.node_rank));
  plan.local_worker = fmt::format("{}:{}", host.name, host.ordinal);
}

void choose_service_address(Resolution& r) {
  auto& plan = r.plan;
  const auto configured = r.environment_of_hosts(variable::service_address);
  const auto variable_name = fmt::format("environment {}", variable::service_address);
  if (!configured.empty()) {
    try {
      plan.service_address = text(parse_host_port(configured));
    } catch (const ConfigError& error) {
      refuse("workers", fmt::format("{}: {}", variable_name, error.what()));
    }
    return r.from("service_address", variable_name);
  }
  if (plan.nprocs == 1) return r.from("service_address", "default: one process needs none");
  if (plan.nnodes == 1) return r.from("service_address", "default: none is bound yet");
  plan.service_address = text(HostPort{plan.master_addr, plan.master_port});
  r.from("service_address", "master_addr, master_port");
}

// Told only where every address is known, and all have their ports in a row.
void choose_endpoints(Resolution& r) {
  auto& plan = r.plan;
  if (!plan.workers.empty()) {
    for (const auto& worker : plan.workers) plan.endpoints.push_back(text(worker.address));
    return r.from("endpoints", "workers");
  }
  auto hosts = plan.ips;
  if (hosts.empty() && plan.nnodes == 1) hosts.push_back(plan.master_addr);
  const bool known = plan.master_port > 0 && static_cast<int>(hosts.size()) == plan.nnodes &&
                     plan.world_size == plan.nnodes * plan.nprocs &&
                     plan.master_port + plan.nprocs - 1 <= highest_port;
  if (!known) return r.from("endpoints", "default: none is known");
  for (const auto& host : hosts)
    for (int i = 0; i < plan.nprocs; ++i)
      plan.endpoints.push_back(text(HostPort{host, plan.master_port + i}));
  r.from("endpoints", "ips, master_port");
}

}  // namespace

std::string Resolution::environment_of_hosts(const char* name) const {
  return variable(variable::ordinal).empty() ? variable(name) : "";
}

void read_worker_form(Resolution& r) {
  read_worker_hosts(r);
  if (r.plan.worker_form == WorkerForm::none) read_form_of_environment(r);
  r.from("worker_form", r.plan.worker_form == WorkerForm::none ? "default" : r.worker_source);
  if (r.plan.worker_form != WorkerForm::none) read_configured_devices(r);
}

void choose_workers(Resolution& r) {
  auto& plan = r.plan;
  r.from("workers", "default: none");
  r.from("service_address", "default: none");
  if (!plan.worker_hosts.empty()) r.from("workers", r.worker_source);
  if (plan.worker_form == WorkerForm::worker) {
    plan.workers = expand_workers(plan.worker_hosts, plan.nprocs);
    if (plan.workers.empty()) r.from("workers", "default: none is bound yet");
  }
  if (plan.worker_form == WorkerForm::tpu) choose_local_worker(r);
  if (plan.worker_form != WorkerForm::none) choose_service_address(r);
  choose_endpoints(r);
}

}  // namespace accelmgr::launch
