#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cerrno>
#include <cstdio>

#include "base/log.hpp"
#include "config/start_method.hpp"
#include "ipc/process.hpp"
#include "launch/environ.hpp"
#include "launch/environment.hpp"
#include "launch/functions.hpp"
#include "launch/kept.hpp"
#include "launch/limits.hpp"
#include "launch/plan.hpp"
#include "launch/ports.hpp"
#include "launch/processes.hpp"
#include "launch/serial_memory.hpp"
#include "launch/variables.hpp"
#include "launch/world_memory.hpp"

namespace accelmgr::launch {
namespace {

using Target = std::variant<std::string, Function>;

constexpr double start_timeout_s = 60;

/// Everything that can be wrong about what is to be called, before anything is started.
void check_target(const Target& target, const Options& options) {
  const auto* name = std::get_if<std::string>(&target);
  if (name != nullptr) registered_function(*name);
  if (!options.setup_name.empty()) registered_function(options.setup_name);
  if (options.setup && !options.setup_name.empty())
    throw UsageError("options.setup and options.setup_name are both set; a process has one setup");
  if (options.start_method == StartMethod::fork) return;
  const auto* method = config::name_of(options.start_method);
  if (name == nullptr)
    throw UsageError(
        fmt::format("a callable does not get into a process started by '{}': register it by name "
                    "(launch::register_function), or use the start method 'fork'",
                    method));
  if (options.setup)
    throw UsageError(
        fmt::format("options.setup does not get into a process started by '{}': register it by name and "
                    "use setup_name, or the start method 'fork'",
                    method));
}

/// In the memory of this process, for one that is this process or forked from it.
struct Calls {
  std::function<void(int)> setup;
  std::function<Value(int)> function;
};

Calls calls_of(const Target& target, const Value& args, const Options& options) {
  Calls calls;
  if (options.setup) calls.setup = [setup = options.setup](int) { setup(); };
  if (!options.setup_name.empty())
    calls.setup = [&setup = registered_function(options.setup_name), &args](int rank) { setup(rank, args); };
  const auto* name = std::get_if<std::string>(&target);
  const auto& function = name != nullptr ? registered_function(*name) : std::get<Function>(target);
  calls.function = [&function, &args](int rank) { return function(rank, args); };
  return calls;
}

/// A launch up to its start: what it was resolved to, and what its processes are given.
struct Launch {
  Machine machine = this_machine();
  Plan plan;
  WorkerPorts ports;
  base::UniqueFd world_memory;

  explicit Launch(const Options& options) : plan(resolve(options, machine)) {
    for (const auto& warning : plan.warnings) base::log().warn("{}", warning);
    ports = bind_worker_ports(plan, machine);
    world_memory = make_world_memory(plan);
    if (options.print_config) fmt::print("{}", text(plan));
  }

  std::map<std::string, std::string> environment(int local_index) const {
    auto variables = child_environment(plan, local_index, machine);
    variables[variable::serial_memory] = serial_memory_path();
    if (world_memory) variables[variable::world_memory] = path_of(world_memory);
    return variables;
  }
};

/// One process, which the caller waits for: this one.
SpawnContext run_in_place(Launch launch, const Calls& calls) {
  const EnvironmentScope scope(launch.environment(0));
  const int rank = launch.plan.rank(0);
  if (calls.setup) calls.setup(rank);
  return SpawnContext(std::make_unique<SpawnContext::Processes>(rank, calls.function(rank)));
}

void warn_of_threads() try {
  if (ipc::thread_count() == 1) return;
  base::log().warn(
      "spawn: the start method 'fork' copies a process that has other threads ({}); what they hold locked "
      "stays locked "
      "in the copies. 'spawn' and 'forkserver' copy nothing",
      fmt::join(ipc::thread_names(), ", "));
} catch (const std::exception&) {
  // /proc cannot be read: the start itself will say why.
}

Spawner make_spawner(const Launch& launch, const Calls& calls) {
  switch (launch.plan.start_method) {
    case StartMethod::forkserver:
      return Spawner::execute();
    case StartMethod::spawn:
      return Spawner::fork();
    case StartMethod::fork:
      break;
  }
  warn_of_threads();
  return Spawner::fork(calls.function, calls.setup);
}

std::unique_ptr<SpawnContext::Processes> start(Launch launch, const Target& target, const Value& args,
                                               const Options& options) {
  std::shared_ptr<const Parcel> call;
  if (launch.plan.start_method != StartMethod::fork)
    call = make_call(std::get<std::string>(target), options.setup_name, args);
  auto processes = std::make_unique<SpawnContext::Processes>(
      make_spawner(launch, calls_of(target, args, options)),
      SpawnContext::Processes::Settings{launch.plan.daemon, launch.plan.terminate_timeout_s});
  for (int i = 0; i < launch.plan.nprocs; ++i)
    processes->start({.rank = launch.plan.rank(i),
                      .environment = launch.environment(i),
                      .program = {},
                      .call = call,
                      .execute_self = launch.plan.start_method == StartMethod::spawn},
                     launch.ports.descriptors(i));
  processes->hold(std::move(launch.world_memory));
  processes->wait_started(base::Deadline::in_seconds(start_timeout_s));
  return processes;
}

template <class Make>
auto naming_limits(Make make) {
  try {
    return make();
  } catch (const SystemError& error) {
    throw with_limit(error);
  }
}

}  // namespace

SpawnContext spawn(const Target& function, const Value& args, const Options& options) {
  check_target(function, options);
  prepare_to_keep();
  auto launch = naming_limits([&] { return Launch(options); });
  if (launch.plan.nprocs == 1 && launch.plan.join)
    return run_in_place(std::move(launch), calls_of(function, args, options));
  SpawnContext context(naming_limits([&] { return start(std::move(launch), function, args, options); }));
  if (options.join) context.join();
  return context;
}

}  // namespace accelmgr::launch
