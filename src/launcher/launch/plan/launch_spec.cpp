#include "launcher/launch/plan/launch_spec.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cmath>
#include <utility>

#include "base/config/start_method.hpp"
#include "launcher/launch/plan/resolution.hpp"

namespace accelmgr::launch {
namespace {

void check_environment(const std::map<std::string, std::string>& environment) {
  for (const auto& [name, value] : environment)
    if (name.empty() || name.find_first_of(std::string_view("=\0", 2)) != std::string::npos ||
        value.find('\0') != std::string::npos)
      refuse("environment",
             fmt::format("option environment has '{}': a name must not be empty or contain '=', and neither "
                         "name nor value may contain a zero byte",
                         name));
}

template <class T>
void take(Resolution& r, const char* name, T LaunchSpec::*field, T Options::*option) {
  r.spec.*field = r.options.*option;
  r.from(name, r.options.*option == Options().*option ? "default" : from_option);
}

void take_the_rest(Resolution& r) {
  take(r, "start_method", &LaunchSpec::start_method, &Options::start_method);
  take(r, "join", &LaunchSpec::join, &Options::join);
  take(r, "daemon", &LaunchSpec::daemon, &Options::daemon);
  take(r, "oversubscribe", &LaunchSpec::oversubscribe, &Options::oversubscribe);
  take(r, "timeout_s", &LaunchSpec::timeout_s, &Options::timeout_s);
  take(r, "terminate_timeout_s", &LaunchSpec::terminate_timeout_s, &Options::terminate_timeout_s);
  take(r, "environment", &LaunchSpec::environment, &Options::environment);
}

const char* name_of(WorkerForm form) {
  constexpr std::array names{"none", "worker", "tpu"};
  return names.at(static_cast<std::size_t>(form));
}

std::string workers_text(const LaunchSpec& spec) {
  return spec.xla.form == WorkerForm::tpu ? text(spec.xla.nodes, WorkerForm::tpu)
                                          : text(spec.xla.workers, WorkerForm::worker);
}

// Names only, because values may be secrets.
std::string names_in(const std::map<std::string, std::string>& environment) {
  std::vector<std::string> names;
  for (const auto& [name, value] : environment) names.push_back(name);
  return fmt::format("{}", fmt::join(names, ","));
}

}  // namespace

void refuse(const std::string& key, const std::string& what) { throw ConfigError(what, key); }

void check_values(const Options& options) {
  if (options.nprocs == 0 || options.nprocs < -1 || options.nprocs > most_processes)
    refuse("nprocs",
           fmt::format("option nprocs is {}; it must be from 1 to {}, or -1 for all visible devices",
                       options.nprocs, most_processes));
  const auto at_least = [](const char* key, int value, int least, const char* meaning) {
    if (value < least)
      refuse(key, fmt::format("option {} is {}; it must be at least {} ({})", key, value, least, meaning));
  };
  at_least("nnodes", options.nnodes, 0, "0: from ips, workers or world_size");
  if (options.nnodes > most_nodes)
    refuse("nnodes", fmt::format("option nnodes is {}; it must be at most {}", options.nnodes, most_nodes));
  at_least("node_rank", options.node_rank, -1, "-1: found among ips or workers");
  at_least("rank_offset", options.rank_offset, 0, "the rank of the first process here");
  at_least("world_size", options.world_size, 0, "0: nprocs times the number of nodes");
  if (options.master_port < 0 || options.master_port > ipc::highest_port)
    refuse("master_port", fmt::format("option master_port is {}; it must be from 0 to {}",
                                      options.master_port, ipc::highest_port));
  if (!(options.timeout_s > 0) || !std::isfinite(options.timeout_s))
    refuse("timeout_s",
           fmt::format("option timeout_s is {}; it must be a number of seconds above 0", options.timeout_s));
  if (!(options.terminate_timeout_s >= 0) || !std::isfinite(options.terminate_timeout_s))
    refuse("terminate_timeout_s",
           fmt::format("option terminate_timeout_s is {}; it must be a number of seconds, 0 or more",
                       options.terminate_timeout_s));
  check_environment(options.environment);
}

std::string Resolution::variable(const char* name) const {
  const auto found = node_info.environment.find(name);
  return found == node_info.environment.end() ? "" : found->second;
}

LaunchSpec resolve(const Options& options, const NodeInfo& node_info) {
  Resolution r{.options = options, .node_info = node_info};
  check_values(options);
  read_worker_form(r);
  choose_device(r);
  choose_nprocs(r);
  choose_nodes(r);
  choose_backend(r);
  choose_visible_devices(r);
  choose_workers(r);
  take_the_rest(r);
  return std::move(r.spec);
}

bool ranks_meet_in_memory(const LaunchSpec& spec) {
  return spec.nnodes == 1 && (spec.backend == "shm" || (spec.backend != "serial" && spec.nprocs > 1));
}

std::string text(const LaunchSpec& spec) {
  const std::pair<const char*, std::string> rows[] = {
      {"device", spec.device},
      {"backend", spec.backend},
      {"nprocs", std::to_string(spec.nprocs)},
      {"visible_devices", fmt::format("{}", fmt::join(spec.visible_devices, ","))},
      {"nnodes", std::to_string(spec.nnodes)},
      {"node_rank", std::to_string(spec.node_rank)},
      {"world_size", std::to_string(spec.world_size)},
      {"rank_offset", std::to_string(spec.rank_offset)},
      {"ips", fmt::format("{}", fmt::join(spec.ips, ","))},
      {"master_addr", spec.master_addr},
      {"master_port", std::to_string(spec.master_port)},
      {"interface", spec.interface},
      {"worker_form", name_of(spec.xla.form)},
      {"workers", workers_text(spec)},
      {"endpoints", fmt::format("{}", fmt::join(spec.endpoints, ","))},
      {"service_address", spec.xla.service_address},
      {"start_method", config::name_of(spec.start_method)},
      {"join", fmt::format("{}", spec.join)},
      {"daemon", fmt::format("{}", spec.daemon)},
      {"oversubscribe", fmt::format("{}", spec.oversubscribe)},
      {"timeout_s", fmt::format("{}", spec.timeout_s)},
      {"terminate_timeout_s", fmt::format("{}", spec.terminate_timeout_s)},
      {"environment", names_in(spec.environment)},
  };
  std::string lines;
  for (const auto& [key, value] : rows)
    lines += fmt::format("{} = {}  ({})\n", key, value, spec.sources.at(key));
  return lines;
}

}  // namespace accelmgr::launch
