#include <fmt/format.h>

#include <utility>

#include "accelmgr/distributed_context.hpp"
#include "distributed/context/backends.hpp"
#include "distributed/context/join.hpp"
#include "distributed/store/tcp_store.hpp"
#include "launch/plan/variables.hpp"
#include "launch/run/functions.hpp"

namespace accelmgr::distributed {
namespace {

constexpr const char* entry = "accelmgr.distributed.spawn";
constexpr int default_port = 2222;  // For several hosts.

// What a child needs besides the function.
Value task_of(const std::string& backend, const Value& args, const Value& kwargs,
              const SpawnOptions& options) {
  auto all = args.is_array() ? args : Value::array({args});
  if (!kwargs.is_null()) all.push_back(kwargs);
  return {{"backend", backend},
          {"init_method", options.init_method},
          {"timeout_s", options.timeout_s},
          {"world_size", options.nnodes * options.nproc_per_node},
          {"args", std::move(all)}};
}

Value run(const launch::Function& function, int rank, const Value& task) {
  const int world_size = task.at("world_size").get<int>();
  initialize(task.at("backend").get<std::string>(), {.timeout_s = task.at("timeout_s").get<double>(),
                                                     .init_method = task.at("init_method").get<std::string>(),
                                                     .rank = rank,
                                                     .world_size = world_size});
  // A rank that fails does not call finalize(): the others' errors about it could be reported before its own
  // failure, which is the cause. The others notice its end after the report.
  auto result = function(get_local_rank(), task.at("args"));
  finalize();
  return result;
}

// Registered by name, because a child that executes this program again finds functions only by name.
const bool registered = [] {
  launch::register_function(entry, [](int rank, const Value& task) {
    return run(launch::registered_function(task.at("function").get<std::string>()), rank, task);
  });
  return true;
}();

void check(const std::string& backend, const Value& kwargs, const SpawnOptions& options) {
  check_backend(backend);
  if (options.nproc_per_node < 1)
    throw ConfigError(fmt::format("nproc_per_node is {}; it must be 1 or more", options.nproc_per_node),
                      "nproc_per_node");
  if (options.nnodes < 1)
    throw ConfigError(fmt::format("nnodes is {}; it must be 1 or more", options.nnodes), "nnodes");
  if (options.node_rank < 0 || options.node_rank >= options.nnodes)
    throw ConfigError(fmt::format("node_rank is {}; with {} nodes it must be 0 to {}", options.node_rank,
                                  options.nnodes, options.nnodes - 1),
                      "node_rank");
  if (options.master_port < 0 || options.master_port > 65535)
    throw ConfigError(
        fmt::format("master_port is {}; it must be 1 to 65535, or 0 for the default", options.master_port),
        "master_port");
  check_init_method(options.init_method);
  if (!kwargs.is_null() && !kwargs.is_object())
    throw UsageError(fmt::format("kwargs is of type {}; it must be an object, or null", kwargs.type_name()));
}

launch::Options launch_options(const std::string& backend, const SpawnOptions& options) {
  launch::Options launch;
  launch.nprocs = options.nproc_per_node;
  launch.nnodes = options.nnodes;
  launch.node_rank = options.node_rank;
  launch.join = options.join;
  launch.daemon = options.daemon;
  launch.start_method = options.start_method;
  launch.backend = backend;
  launch.master_addr = options.master_addr;
  launch.master_port = options.master_port;
  launch.timeout_s = options.timeout_s;
  return launch;
}

}  // namespace

launch::SpawnContext spawn(const std::string& backend, const std::variant<std::string, launch::Function>& fn,
                           const Value& args, const Value& kwargs, const SpawnOptions& options) {
  check(backend, kwargs, options);
  auto task = task_of(backend, args, kwargs, options);
  auto launch = launch_options(backend, options);
  std::variant<std::string, launch::Function> function = entry;
  if (const auto* name = std::get_if<std::string>(&fn)) {
    launch::registered_function(*name);  // Throws for an unknown name here, not in each child.
    task["function"] = *name;
  } else {
    function = [callable = std::get<launch::Function>(fn)](int rank, const Value& what) {
      return run(callable, rank, what);
    };
  }
  launch.join = false;  // Also of a single process: it has a process of its own.
  const bool by_store = options.nnodes > 1 && is_by_environment(options.init_method);
  // The ranks of several hosts meet at a store, which this process serves on the first host. The port is
  // bound before any child is started; the store's threads start after all children have been forked.
  base::UniqueFd socket;
  if (by_store) {
    if (launch.master_port == 0) launch.master_port = default_port;
    launch.environment[launch::variable::agent_store] = "True";
    if (options.node_rank == 0) socket = ipc::bind_tcp(options.master_addr, launch.master_port);
  }
  auto context = launch::spawn(function, task, launch);
  if (socket) context.hold(TcpStore::serve(std::move(socket)));
  if (options.join) context.join();
  return context;
}

}  // namespace accelmgr::distributed
