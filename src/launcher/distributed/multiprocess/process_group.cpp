#include "launcher/distributed/multiprocess/process_group.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <utility>

#include "base/log.hpp"
#include "launcher/distributed/context/backends.hpp"
#include "launcher/distributed/context/initialize.hpp"
#include "launcher/distributed/store/torch.hpp"
#include "launcher/launch/plan/variables.hpp"

namespace accelmgr {
namespace {

namespace variable = launch::variable;

constexpr const char* our_variable = "ACCELMGR_DISTRIBUTED_BACKEND";
constexpr const char* torch_variable = "TORCH_DISTRIBUTED_BACKEND";
constexpr std::array described{variable::rank,        variable::local_rank,
                               variable::world_size,  variable::local_world_size,
                               variable::master_addr, variable::master_port};
// Variables that are valid only for the ranks of the launch that set them.
constexpr std::array of_launch{variable::node_rank, variable::node_count, variable::world_memory,
                               variable::agent_store};

std::optional<std::string> value_of(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
}

void set(const char* name, const std::string& value) { ::setenv(name, value.c_str(), /*overwrite=*/1); }
void set(const char* name, int value) { set(name, std::to_string(value)); }

struct Chosen {
  const char* variable;
  std::string backend;
};

std::optional<Chosen> chosen_backend() {
  for (const char* name : {our_variable, torch_variable})
    if (auto value = value_of(name)) return Chosen{name, std::move(*value)};
  return std::nullopt;
}

void check(const Chosen& chosen) {
  try {
    distributed::check_backend(chosen.backend);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{}={}: {}", chosen.variable, chosen.backend, error.what()), error.key());
  }
}

void set_environment(const MultiprocessConfig& config) {
  const bool same_launch = value_of(variable::rank) == std::to_string(config.rank) &&
                           value_of(variable::world_size) == std::to_string(*config.world_size);
  if (!same_launch)
    for (const char* name : of_launch) ::unsetenv(name);
  set(variable::rank, config.rank);
  set(variable::local_rank, config.local_rank);
  set(variable::world_size, *config.world_size);
  set(variable::local_world_size, *config.local_world_size);
  set(variable::master_addr, config.master_addr);
  set(variable::master_port, *config.master_port);
}

}  // namespace

void join_process_group(const std::optional<std::string>& backend, std::optional<double> timeout_s,
                        const std::string& init_method, base::UniqueFd socket) {
  auto name = backend.value_or(get_distributed_backend());
  if (!backend) {
    if (const auto chosen = chosen_backend())
      check(*chosen);
    else if (name == "shm")
      name = distributed::auto_backend;
  }
  distributed::initialize(name, {.timeout_s = timeout_s, .init_method = init_method}, std::move(socket));
  distributed::use_cuda_device(distributed::get_local_rank());
  const int world_size = distributed::get_world_size();
  base::log().debug("process group of {} ranks initialized with backend {}; checking it with an all-reduce",
                    world_size, name);
  if (const double counted = distributed::all_reduce(1.0); counted != world_size)
    throw SessionError(fmt::format("the process group has {} ranks, but an all-reduce of ones gave {:g}",
                                   world_size, counted));
}

std::string default_backend() { return distributed::visible_gpus() > 0 ? "nccl" : "shm"; }

std::string get_distributed_backend() {
  const auto chosen = chosen_backend();
  return chosen ? chosen->backend : default_backend();
}

void set_distributed_backend(const std::string& backend) {
  distributed::check_backend(backend);
  set(our_variable, backend);
}

void init_process_group_from_backend(const std::optional<std::string>& backend,
                                     std::optional<double> timeout_s) {
  join_process_group(backend, timeout_s, "");
}

base::UniqueFd taken_port(const MultiprocessConfig& config) {
  if (!config.bound_port) return {};
  return std::move(*static_cast<base::UniqueFd*>(config.bound_port.get()));
}

void join_as_rank(MultiprocessConfig config, const char* caller) {
  MultiprocessConfig::resolve(config);
  if (config.rank < 0 || config.local_rank < 0)
    throw ConfigError(fmt::format("{}: rank is {} and local_rank {}; both must be 0 or more", caller,
                                  config.rank, config.local_rank),
                      "rank");
  set_environment(config);
  auto socket = taken_port(config);
  if (config.rank != 0) socket.reset();
  join_process_group(config.backend, std::nullopt, config.init_method, std::move(socket));
}

void init_dist(int rank, int local_rank, int world_size, int local_world_size, const std::string& master_addr,
               int master_port, const std::string& init_method, const std::optional<std::string>& backend) {
  MultiprocessConfig config;
  config.rank = rank;
  config.local_rank = local_rank;
  config.world_size = world_size;
  config.local_world_size = local_world_size;
  config.master_addr = master_addr;
  config.master_port = master_port;
  config.init_method = init_method;
  config.backend = backend;
  join_as_rank(std::move(config), "init_dist()");
}

std::vector<const char*> variables_of_a_rank() {
  std::vector<const char*> names(described.begin(), described.end());
  names.insert(names.end(), of_launch.begin(), of_launch.end());
  return names;
}

}  // namespace accelmgr
