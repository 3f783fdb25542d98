#include <fmt/format.h>

#include <algorithm>

#include "accelmgr/multiprocess_launch.hpp"
#include "base/config/start_method.hpp"
#include "base/ipc/host_port.hpp"
#include "launcher/distributed/context/backends.hpp"
#include "launcher/distributed/context/join.hpp"
#include "launcher/distributed/context/world_environment.hpp"
#include "launcher/distributed/multiprocess/parallel_layout.hpp"
#include "launcher/distributed/multiprocess/process_group.hpp"
#include "launcher/launch/plan/options.hpp"
#include "launcher/launch/run/ports.hpp"

namespace accelmgr {
namespace {

constexpr int first_port = 29500;  // The default of torchrun too.

[[noreturn]] void refuse(const char* key, const std::string& what) { throw ConfigError(what, key); }

void check_backends(const MultiprocessConfig& config) {
  for (const auto* backend : {&config.backend, &config.model_parallel_backend,
                              &config.pipeline_parallel_backend, &config.data_parallel_backend})
    if (*backend) distributed::check_backend(**backend);
}

std::optional<std::string> backend_of(const std::string& name) {
  return name.empty() || name == distributed::auto_backend ? std::nullopt : std::optional(name);
}

}  // namespace

void check_range(const char* key, int value, int least, int most, const std::string& of) {
  if (value < least || value > most)
    refuse(key, fmt::format("{} is {}; {}it must be {} to {}", key, value, of, least, most));
}

void resolve(MultiprocessConfig& config, int gpus) {
  if (!config.world_size) config.world_size = std::max(1, gpus);
  const int world_size = *config.world_size;
  if (world_size < 1) refuse("world_size", fmt::format("world_size is {}; it must be 1 or more", world_size));
  // Several nodes have one rank for each GPU. They meet at an address that other nodes can reach.
  const bool several_nodes = gpus > 0 && !distributed::is_loopback(config.master_addr);
  if (!config.local_world_size)
    config.local_world_size = several_nodes ? std::min(gpus, world_size) : world_size;
  const auto of_world = fmt::format("in a world of {} ", world_size);
  check_range("local_world_size", *config.local_world_size, 1, world_size, of_world);
  if (config.rank != -1) check_range("rank", config.rank, 0, world_size - 1, of_world);
  if (config.local_rank != -1)
    check_range("local_rank", config.local_rank, 0, *config.local_world_size - 1,
                fmt::format("with {} processes on this node ", *config.local_world_size));
  if (config.master_addr.empty())
    refuse("master_addr", "master_addr is empty; it must be a host name or an address");
  distributed::check_init_method(config.init_method);
  check_backends(config);
  distributed::parallel_layout(world_size, config.model_parallelism, config.pipeline_parallelism);
  if (config.master_port) {
    check_range("master_port", *config.master_port, 1, ipc::highest_port);
  } else {
    auto bound = launch::bind_port(first_port);
    config.master_port = bound.port;
    config.bound_port = std::make_shared<base::UniqueFd>(std::move(bound.socket));
  }
}

void MultiprocessConfig::resolve(MultiprocessConfig& config) {
  accelmgr::resolve(config, distributed::visible_gpus());
}

std::string MultiprocessConfig::text() const {
  std::string lines;
  const auto line = [&](const char* key, const auto& value) {
    lines += fmt::format("{} = {}\n", key, value);
  };
  const auto maybe = [&](const char* key, const auto& value) {
    if (value)
      line(key, *value);
    else
      line(key, "unset");
  };
  line("rank", rank);
  line("local_rank", local_rank);
  maybe("world_size", world_size);
  maybe("local_world_size", local_world_size);
  line("master_addr", master_addr);
  maybe("master_port", master_port);
  line("init_method", init_method);
  line("model_parallelism", model_parallelism);
  line("pipeline_parallelism", pipeline_parallelism);
  maybe("backend", backend);
  maybe("model_parallel_backend", model_parallel_backend);
  maybe("pipeline_parallel_backend", pipeline_parallel_backend);
  maybe("data_parallel_backend", data_parallel_backend);
  line("launch_method", config::name_of(launch_method));
  return lines;
}

MultiprocessConfig MultiprocessConfig::of(const Config& config) {
  const auto& from = config.launch;
  MultiprocessConfig to;
  if (from.nprocs > 0)
    to.local_world_size = from.nprocs;
  else if (from.nnodes > 1)
    to.local_world_size = std::max(1, distributed::visible_gpus());
  if (to.local_world_size) to.world_size = *to.local_world_size * from.nnodes;
  if (const auto address = launch::rendezvous_of(from)) {
    to.master_addr = address->host;
    if (address->port > 0) to.master_port = address->port;
  }
  to.backend = backend_of(from.backend);
  to.model_parallel_backend = backend_of(from.model_parallel_backend);
  to.pipeline_parallel_backend = backend_of(from.pipeline_parallel_backend);
  to.data_parallel_backend = backend_of(from.data_parallel_backend);
  to.model_parallelism = from.model_parallelism;
  to.pipeline_parallelism = from.pipeline_parallelism;
  to.launch_method = from.start_method;
  return to;
}

}  // namespace accelmgr
