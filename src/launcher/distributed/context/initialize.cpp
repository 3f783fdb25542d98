#include "launcher/distributed/context/initialize.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <utility>

#include "launcher/distributed/context/backends.hpp"
#include "launcher/distributed/context/context.hpp"
#include "launcher/distributed/store/torch.hpp"
#include "launcher/launch/compat/variables.hpp"

namespace accelmgr::distributed {
namespace {

int given_or_set(const char* option, std::optional<int> given, const char* name, std::optional<int> set,
                 bool must_agree) {
  if (given && set && must_agree && *given != *set)
    throw ConfigError(
        fmt::format("initialize(): {} is {}, but the environment says {}={}", option, *given, name, *set));
  if (given) return *given;
  if (set) return *set;
  throw ConfigError(
      fmt::format("initialize(): {} is not set in the environment, and {} was not given: start the "
                  "ranks with a launcher (accelmgr spawn, torchrun), or pass both rank and world_size",
                  name, option));
}

/// The environment, with the options in place of its variables.
Environment environment_for(const InitializeOptions& options) {
  auto environment = read_environment();
  const bool by_environment = is_by_environment(options.init_method);
  const auto world_size =
      given_or_set("world_size", options.world_size, "WORLD_SIZE", environment.world_size, by_environment);
  const auto rank = given_or_set("rank", options.rank, "RANK", environment.rank, by_environment);
  if (world_size < 1)
    throw ConfigError(fmt::format("initialize(): world_size is {}; it must be 1 or more", world_size));
  if (rank < 0 || rank >= world_size)
    throw ConfigError(fmt::format("initialize(): rank is {}; in a world of {} it must be 0 to {}", rank,
                                  world_size, world_size - 1));
  if ((environment.rank && environment.rank != rank) ||
      (environment.world_size && environment.world_size != world_size)) {
    // The variables describe another world.
    environment.local_rank = environment.local_world_size = environment.node_rank = environment.node_count =
        std::nullopt;
    environment.world_memory.clear();
  }
  environment.rank = rank;
  environment.world_size = world_size;
  // The ranks meet elsewhere: a loopback MASTER_ADDR must not make place_of() assume one node.
  if (!by_environment) environment.master_addr.clear();
  return environment;
}

}  // namespace

void initialize(const std::string& backend, const InitializeOptions& options) {
  initialize(backend, options, base::UniqueFd());
}

void initialize(const std::string& backend, const InitializeOptions& options, base::UniqueFd socket) {
  check_backend(backend);
  if (const auto& present = current_unchanged();
      !present.is_serial() && (present.is_kept() || present.is_joined()))
    throw UsageError(fmt::format(
        "initialize(): there is a context already: {} {}, rank {} of {}; finalize() ends it",
        present.model_name(), present.backend().value_or(""), present.rank(), present.world_size()));
  if (options.timeout_s && !(*options.timeout_s > 0))
    throw ConfigError(fmt::format("initialize(): timeout_s is {}; it must be above 0", *options.timeout_s));
  auto request = request_of(environment_for(options));
  request.backend = backend;
  request.init_method = options.init_method;
  request.timeout_s = options.timeout_s.value_or(request.timeout_s);
  request.socket = std::move(socket);
  auto context = std::make_unique<Context>(std::move(request));
  context->world()->barrier();
  context->keep();
  // The ranks of a node see the GPUs of all of them, and each computes on its own.
  const bool on_gpu =
      context->backend() == nccl_backend || std::getenv(launch::variable::selected_gpus) != nullptr;
  replace_context(std::move(context));
  if (on_gpu) use_cuda_device(get_local_rank());
}

}  // namespace accelmgr::distributed
