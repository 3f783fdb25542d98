#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include "base/config/start_method.hpp"
#include "base/ipc/process.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "launcher/collective/shm/factory.hpp"
#include "launcher/launch/plan/child_environment.hpp"
#include "launcher/launch/plan/environment_scope.hpp"
#include "launcher/launch/plan/launch_spec.hpp"
#include "launcher/launch/plan/variables.hpp"
#include "launcher/launch/run/detached_contexts.hpp"
#include "launcher/launch/run/limits.hpp"
#include "launcher/launch/run/ports.hpp"
#include "launcher/launch/run/processes.hpp"
#include "launcher/launch/run/registered_functions.hpp"
#include "launcher/launch/serial/serial_memory.hpp"

namespace accelmgr::launch {
namespace {

using Target = std::variant<std::string, Function>;

/// Checks the function and the setup before any process is started.
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
        fmt::format("a callable cannot be passed to a process started by '{}': register it by name "
                    "(launch::register_function), or use the start method 'fork'",
                    method));
  if (options.setup)
    throw UsageError(
        fmt::format("options.setup cannot be passed to a process started by '{}': register it by name and "
                    "use setup_name, or the start method 'fork'",
                    method));
}

/// Only this process and its forks can make them.
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

base::UniqueFd make_world_memory(const LaunchSpec& spec) {
  return ranks_meet_in_memory(spec) ? collective::shm::create_world(spec.nprocs) : base::UniqueFd();
}

/// A launch before its start: the launch spec, and the ports and memory that the processes get.
struct Launch {
  NodeInfo node_info = this_node();
  LaunchSpec spec;
  WorkerPorts ports;
  base::UniqueFd world_memory;

  explicit Launch(const Options& options) : spec(resolve(options, node_info)) {
    for (const auto& warning : spec.warnings) base::log().warn("{}", warning);
    ports = bind_worker_ports(spec, node_info);
    world_memory = make_world_memory(spec);
    if (options.print_config) fmt::print("{}", text(spec));
  }

  std::map<std::string, std::string> environment(int local_index) const {
    auto variables = child_environment(spec, local_index, node_info);
    variables[variable::serial_memory] = serial_memory_path();
    if (world_memory)
      variables[variable::world_memory] = fmt::format("/proc/{}/fd/{}", getpid(), world_memory.get());
    return variables;
  }
};

/// Calls the function in this process, for a launch of one process that the caller joins.
SpawnContext run_in_place(Launch launch, const Calls& calls) {
  const EnvironmentScope scope(launch.environment(0));
  const int rank = launch.spec.rank(0);
  if (calls.setup) calls.setup(rank);
  return SpawnContext(std::make_unique<SpawnContext::Processes>(rank, calls.function(rank)));
}

void warn_of_threads() try {
  if (ipc::thread_count() == 1) return;
  base::log().warn(
      "spawn: the start method 'fork' copies a process that has other threads ({}); locks that they hold "
      "stay locked in the copies. 'spawn' and 'forkserver' copy nothing",
      fmt::join(ipc::thread_names(), ", "));
} catch (const std::exception&) {
  // /proc cannot be read. If that matters, the start fails and says why.
}

Spawner make_spawner(const Launch& launch, const Calls& calls) {
  switch (launch.spec.start_method) {
    case StartMethod::forkserver:
      return Spawner::from_zygote();
    case StartMethod::spawn:
      return Spawner::execute_server();
    case StartMethod::fork:
      break;
  }
  warn_of_threads();
  return Spawner::fork(calls);
}

std::unique_ptr<SpawnContext::Processes> start(Launch launch, const Target& target, const Value& args,
                                               const Options& options) {
  std::shared_ptr<const TextMessage> call;
  if (launch.spec.start_method != StartMethod::fork)
    call = make_call(std::get<std::string>(target), options.setup_name, args);
  auto processes = std::make_unique<SpawnContext::Processes>(
      make_spawner(launch, calls_of(target, args, options)),
      SpawnContext::Processes::Settings{launch.spec.daemon, launch.spec.terminate_timeout_s});
  for (int i = 0; i < launch.spec.nprocs; ++i)
    processes->start({.rank = launch.spec.rank(i),
                      .environment = launch.environment(i),
                      .program = {},
                      .call = call,
                      .execute_self = launch.spec.start_method == StartMethod::spawn},
                     launch.ports.descriptors(i));
  // The processes open its memory as /proc/PID/fd/N.
  processes->hold(std::make_shared<base::UniqueFd>(std::move(launch.world_memory)));
  processes->wait_started(base::Deadline::in_seconds(timing::spawn_start_s));
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
  prepare_detached_contexts();
  auto launch = naming_limits([&] { return Launch(options); });
  if (launch.spec.nprocs == 1 && launch.spec.join)
    return run_in_place(std::move(launch), calls_of(function, args, options));
  SpawnContext context(naming_limits([&] { return start(std::move(launch), function, args, options); }));
  if (options.join) context.join();
  return context;
}

}  // namespace accelmgr::launch
