#include "accelmgr/multiprocess_launch.hpp"

#include <fmt/format.h>

#include <memory>
#include <utility>

#include "base/log.hpp"
#include "distributed/context/join.hpp"
#include "distributed/multiprocess/process_group.hpp"
#include "distributed/store/tcp_store.hpp"
#include "launch/plan/variables.hpp"
#include "launch/run/environment_scope.hpp"
#include "launch/run/functions.hpp"

namespace accelmgr {
namespace {

using launch::Value;
constexpr const char* entry = "accelmgr.launch_subprocesses";

Value to_value(const std::optional<std::string>& text) { return text ? Value(*text) : Value(nullptr); }
std::optional<std::string> text_of(const Value& value) {
  return value.is_null() ? std::nullopt : std::optional(value.get<std::string>());
}

// The part of a resolved configuration that a child needs.
Value to_value(const MultiprocessConfig& config) {
  return {{"world_size", *config.world_size},
          {"local_world_size", *config.local_world_size},
          {"master_addr", config.master_addr},
          {"master_port", *config.master_port},
          {"init_method", config.init_method},
          {"model_parallelism", config.model_parallelism},
          {"pipeline_parallelism", config.pipeline_parallelism},
          {"backend", to_value(config.backend)},
          {"model_parallel_backend", to_value(config.model_parallel_backend)},
          {"pipeline_parallel_backend", to_value(config.pipeline_parallel_backend)},
          {"data_parallel_backend", to_value(config.data_parallel_backend)}};
}

MultiprocessConfig config_of(const Value& value) {
  MultiprocessConfig config;
  config.world_size = value.at("world_size").get<int>();
  config.local_world_size = value.at("local_world_size").get<int>();
  config.master_addr = value.at("master_addr").get<std::string>();
  config.master_port = value.at("master_port").get<int>();
  config.init_method = value.at("init_method").get<std::string>();
  config.model_parallelism = value.at("model_parallelism").get<int>();
  config.pipeline_parallelism = value.at("pipeline_parallelism").get<int>();
  config.backend = text_of(value.at("backend"));
  config.model_parallel_backend = text_of(value.at("model_parallel_backend"));
  config.pipeline_parallel_backend = text_of(value.at("pipeline_parallel_backend"));
  config.data_parallel_backend = text_of(value.at("data_parallel_backend"));
  return config;
}

/// Called in a child.
Value run(const launch::Function& function, int rank, const Value& task) {
  auto config = config_of(task.at("config"));
  config.rank = rank;
  config.local_rank = rank - task.at("rank_offset").get<int>();
  return init_and_run(function, config, task.at("args"));
}

// Registered by name, because a child that executes this program again finds functions only by name.
const bool registered = [] {
  launch::register_function(entry, [](int rank, const Value& task) {
    return run(launch::registered_function(task.at("function").get<std::string>()), rank, task);
  });
  return true;
}();

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

void check_offset(const MultiprocessConfig& config, int rank_offset) {
  const int most = *config.world_size - *config.local_world_size;
  if (rank_offset < 0 || rank_offset > most)
    throw ConfigError(
        fmt::format("rank_offset is {}; with {} processes here, in a world of {}, it must be 0 to {}",
                    rank_offset, *config.local_world_size, *config.world_size, most),
        "rank_offset");
}

/// The listening socket of the store for ranks of several hosts. Empty if another host serves the store.
base::UniqueFd bind_store(const MultiprocessConfig& config, int rank_offset) {
  if (rank_offset > 0) return {};
  if (auto socket = taken_port(config)) return socket;
  return ipc::bind_tcp(config.master_addr, *config.master_port);
}

}  // namespace

Value init_and_run(const launch::Function& function, const MultiprocessConfig& config, const Value& args) {
  join_as_rank(config, "init_and_run()");
  const auto backend_or = [&](const std::optional<std::string>& own) { return own ? own : config.backend; };
  init_parallelism(config.model_parallelism, config.pipeline_parallelism,
                   backend_or(config.model_parallel_backend), backend_or(config.pipeline_parallel_backend),
                   backend_or(config.data_parallel_backend));
  return function(config.rank, args);
}

std::optional<launch::SpawnContext> start_subprocesses(
    const std::variant<std::string, launch::Function>& function, MultiprocessConfig config,
    const std::string& setup, int rank_offset, const Value& args) {
  MultiprocessConfig::resolve(config);
  check_offset(config, rank_offset);
  if (const auto* name = std::get_if<std::string>(&function)) launch::registered_function(*name);
  if (!setup.empty()) launch::registered_function(setup);
  if (*config.world_size == 1) {
    run_in_place(function, std::move(config), args);
    return std::nullopt;
  }

  Value task{{"config", to_value(config)}, {"rank_offset", rank_offset}, {"args", args}};
  std::variant<std::string, launch::Function> child = entry;
  if (const auto* name = std::get_if<std::string>(&function)) {
    task["function"] = *name;
  } else {
    child = [callable = std::get<launch::Function>(function)](int rank, const Value& what) {
      return run(callable, rank, what);
    };
  }
  auto options = launch_options(config, setup, rank_offset);
  // Ranks of several hosts meet at a store. On the first host this process serves it; the store's threads
  // start after all children have been forked.
  const bool by_store =
      *config.local_world_size < *config.world_size && distributed::is_by_environment(config.init_method);
  base::UniqueFd socket;
  if (by_store) {
    socket = bind_store(config, rank_offset);
    options.environment[launch::variable::agent_store] = "True";
  } else {
    taken_port(config);  // The port is the ranks': rank 0 may serve a store of torch.distributed there.
  }
  base::log().info("launching {} processes", *config.local_world_size);
  auto context = launch::spawn(child, task, options);
  if (socket) context.hold(distributed::TcpStore::serve(std::move(socket)));
  return context;
}

void launch_subprocesses(const std::variant<std::string, launch::Function>& function,
                         MultiprocessConfig config, const std::string& setup, int rank_offset,
                         const Value& args) {
  auto context = start_subprocesses(function, std::move(config), setup, rank_offset, args);
  if (context) context->join();
}

}  // namespace accelmgr
