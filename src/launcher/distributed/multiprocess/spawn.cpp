#include <fmt/format.h>

#include <utility>

#include "accelmgr/distributed_context.hpp"
#include "launcher/distributed/context/backends.hpp"
#include "launcher/distributed/context/join.hpp"
#include "launcher/distributed/multiprocess/process_group.hpp"
#include "launcher/distributed/store/tcp_store.hpp"
#include "launcher/launch/plan/resolution.hpp"
#include "launcher/launch/plan/variables.hpp"
#include "launcher/launch/run/registered_functions.hpp"

namespace accelmgr {

RankEntry::RankEntry(const char* entry_name, Run run_rank) : name(entry_name), run(run_rank) {
  launch::register_function(name, [run_rank](int rank, const launch::Value& task) {
    return run_rank(launch::registered_function(task.at("function").get<std::string>()), rank, task);
  });
}

launch::SpawnContext start_ranks(const RankEntry& entry,
                                 const std::variant<std::string, launch::Function>& function,
                                 launch::Value task, launch::Options options, bool at_store,
                                 base::UniqueFd socket) {
  std::variant<std::string, launch::Function> child = entry.name;
  if (const auto* name = std::get_if<std::string>(&function)) {
    launch::registered_function(*name);  // Throws for an unknown name here, not in each child.
    task["function"] = *name;
  } else {
    child = [run = entry.run, callable = std::get<launch::Function>(function)](
                int rank, const launch::Value& what) { return run(callable, rank, what); };
  }
  const bool serves = at_store && options.node_rank <= 0 && options.rank_offset == 0;
  if (at_store) options.environment[launch::variable::agent_store] = "True";
  if (!serves)
    socket.reset();  // The port is the ranks': rank 0 may serve a store of torch.distributed there.
  else if (!socket)
    socket = ipc::bind_tcp(options.master_addr, options.master_port);
  auto context = launch::spawn(child, task, options);
  // The store's threads start after all children have been forked.
  if (socket) context.hold(distributed::TcpStore::serve(std::move(socket)));
  return context;
}

namespace distributed {
namespace {

constexpr int default_port = 2222;  // For several nodes.

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

const RankEntry entry("accelmgr.distributed.spawn", [](const launch::Function& function, int rank,
                                                       const Value& task) {
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
});

void check(const std::string& backend, const Value& kwargs, const SpawnOptions& options) {
  check_backend(backend);
  check_range("nproc_per_node", options.nproc_per_node, 1, launch::most_processes);
  check_range("nnodes", options.nnodes, 1, launch::most_nodes);
  check_range("node_rank", options.node_rank, 0, options.nnodes - 1,
              fmt::format("with {} nodes ", options.nnodes));
  check_range("master_port", options.master_port, 0, ipc::highest_port, "0 is the default; ");
  check_init_method(options.init_method);
  if (!kwargs.is_null() && !kwargs.is_object())
    throw UsageError(fmt::format("kwargs is of type {}; it must be an object, or null", kwargs.type_name()));
}

launch::Options launch_options(const std::string& backend, const SpawnOptions& options) {
  launch::Options launch;
  launch.nprocs = options.nproc_per_node;
  launch.nnodes = options.nnodes;
  launch.node_rank = options.node_rank;
  launch.join = false;  // Also of a single process: it has a process of its own.
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
  auto launch = launch_options(backend, options);
  const bool at_store = options.nnodes > 1 && is_by_environment(options.init_method);
  if (at_store && launch.master_port == 0) launch.master_port = default_port;
  auto context = start_ranks(entry, fn, task_of(backend, args, kwargs, options), launch, at_store);
  if (options.join) context.join();
  return context;
}

}  // namespace distributed
}  // namespace accelmgr
