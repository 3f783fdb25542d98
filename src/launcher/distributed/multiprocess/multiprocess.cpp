#include "accelmgr/multiprocess_launch.hpp"

#include <fmt/format.h>

#include <memory>
#include <utility>

#include "base/log.hpp"
#include "launcher/distributed/context/join.hpp"
#include "launcher/distributed/multiprocess/process_group.hpp"
#include "launcher/launch/plan/environment_scope.hpp"
#include "launcher/launch/run/registered_functions.hpp"

namespace accelmgr {
namespace {

using launch::Value;

Value to_value(const std::optional<std::string>& text) { return text ? Value(*text) : Value(nullptr); }
std::optional<std::string> text_of(const Value& value) {
  return value.is_null() ? std::nullopt : std::optional(value.get<std::string>());
}

// What a child needs besides the variables of its environment.
Value task_of(const MultiprocessConfig& config, const Value& args) {
  return {{"args", args},
          {"init_method", config.init_method},
          {"model_parallelism", config.model_parallelism},
          {"pipeline_parallelism", config.pipeline_parallelism},
          {"backend", to_value(config.backend)},
          {"model_parallel_backend", to_value(config.model_parallel_backend)},
          {"pipeline_parallel_backend", to_value(config.pipeline_parallel_backend)},
          {"data_parallel_backend", to_value(config.data_parallel_backend)}};
}

/// Makes the groups of a rank that has joined.
void make_groups(const MultiprocessConfig& config) {
  const auto backend_or = [&](const std::optional<std::string>& own) { return own ? own : config.backend; };
  init_parallelism(config.model_parallelism, config.pipeline_parallelism,
                   backend_or(config.model_parallel_backend), backend_or(config.pipeline_parallel_backend),
                   backend_or(config.data_parallel_backend));
}

const RankEntry entry("accelmgr.launch_subprocesses", [](const launch::Function& function, int rank,
                                                         const Value& task) {
  MultiprocessConfig config;
  config.model_parallelism = task.at("model_parallelism").get<int>();
  config.pipeline_parallelism = task.at("pipeline_parallelism").get<int>();
  config.backend = text_of(task.at("backend"));
  config.model_parallel_backend = text_of(task.at("model_parallel_backend"));
  config.pipeline_parallel_backend = text_of(task.at("pipeline_parallel_backend"));
  config.data_parallel_backend = text_of(task.at("data_parallel_backend"));
  join_process_group(config.backend, std::nullopt, task.at("init_method").get<std::string>());
  make_groups(config);
  return function(rank, task.at("args"));
});

void run_in_place(const std::variant<std::string, launch::Function>& function, MultiprocessConfig config,
                  const Value& args) {
  base::log().warn("launch_subprocesses: the world has one rank; it runs in this process");
  config.rank = config.local_rank = 0;
  struct Leave {
    launch::EnvironmentScope scope{variables_of_a_rank()};
    ~Leave() { distributed::finalize(); }
  };
  const auto* name = std::get_if<std::string>(&function);
  const auto& callable = name ? launch::registered_function(*name) : std::get<launch::Function>(function);
  const Leave leave;
  init_and_run(callable, config, args);
}

launch::Options launch_options(const MultiprocessConfig& config, const std::string& setup, int rank_offset) {
  launch::Options options;
  options.nprocs = *config.local_world_size;
  options.world_size = *config.world_size;
  options.rank_offset = rank_offset;
  options.join = false;
  options.oversubscribe = true;  // The device of a rank is its local rank modulo the number of devices.
  options.start_method = config.launch_method;
  options.backend = config.backend.value_or("auto");
  options.master_addr = config.master_addr;
  options.master_port = *config.master_port;
  options.setup_name = setup;
  return options;
}

}  // namespace

Value init_and_run(const launch::Function& function, const MultiprocessConfig& config, const Value& args) {
  join_as_rank(config, "init_and_run()");
  make_groups(config);
  return function(config.rank, args);
}

std::optional<launch::SpawnContext> start_subprocesses(
    const std::variant<std::string, launch::Function>& function, MultiprocessConfig config,
    const std::string& setup, int rank_offset, const Value& args) {
  MultiprocessConfig::resolve(config);
  check_range("rank_offset", rank_offset, 0, *config.world_size - *config.local_world_size,
              fmt::format("with {} processes here, in a world of {}, ", *config.local_world_size,
                          *config.world_size));
  if (!setup.empty()) launch::registered_function(setup);
  if (*config.world_size == 1) {
    run_in_place(function, std::move(config), args);
    return std::nullopt;
  }
  base::log().info("launching {} processes", *config.local_world_size);
  const bool at_store =
      *config.local_world_size < *config.world_size && distributed::is_by_environment(config.init_method);
  return start_ranks(entry, function, task_of(config, args), launch_options(config, setup, rank_offset),
                     at_store, taken_port(config));
}

void launch_subprocesses(const std::variant<std::string, launch::Function>& function,
                         MultiprocessConfig config, const std::string& setup, int rank_offset,
                         const Value& args) {
  auto context = start_subprocesses(function, std::move(config), setup, rank_offset, args);
  if (context) context->join();
}

}  // namespace accelmgr
