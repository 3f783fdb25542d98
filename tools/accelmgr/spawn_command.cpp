// accelmgr spawn
#include <fmt/core.h>

#include <cstdio>
#include <cstdlib>
#include <optional>

#include "accelmgr/errors.hpp"
#include "agent.hpp"
#include "base/nearest.hpp"
#include "commands.hpp"
#include "config/loader.hpp"
#include "launch/options.hpp"
#include "program_path.hpp"

namespace accelmgr::program {
namespace {

struct SpawnArguments {
  ConfigArguments config;
  std::map<std::string, std::optional<std::string>> values;  ///< By key of the configuration.
  bool oversubscribe = false;
  bool print_config = false;
  bool no_prefix = false;
  bool no_python = false;
  std::vector<std::string> program;
};

/// What the parser left over, and the words after `--`. An option that is unknown is not the name of a
/// program.
std::vector<std::string> program_of(const CLI::App& command,
                                    const std::optional<std::vector<std::string>>& after_dashes) {
  auto words = command.remaining();
  if (!words.empty() && words.front().starts_with('-')) {
    const auto name = words.front().substr(0, words.front().find('='));
    std::vector<std::string> known;
    for (const auto* option : command.get_options()) known.push_back(option->get_name());
    throw CLI::ExtrasError(command.get_name(),
                           {fmt::format("unknown option '{}'{}", name, base::did_you_mean(name, known))});
  }
  if (!after_dashes) return words;
  if (!words.empty()) words.push_back("--");  // It was the program's own.
  words.insert(words.end(), after_dashes->begin(), after_dashes->end());
  return words;
}

config::LoadedConfig load(const SpawnArguments& arguments) {
  auto sets = arguments.config.sets;
  for (const auto& [key, value] : arguments.values)
    if (value) sets.push_back(key + "=" + *value);
  if (arguments.oversubscribe) sets.push_back("launch.oversubscribe=true");
  return config::load_config(arguments.config.file, sets, config::accelmgr_environment());
}

/// What the configuration says of the launch, and what follows from it here.
void print_config(const config::LoadedConfig& loaded, const launch::Plan& plan) {
  const auto all = config::show(loaded);
  for (std::size_t at = 0; at < all.size();) {
    const auto end = all.find('\n', at) + 1;
    const auto line = all.substr(at, end - at);
    if (line.starts_with("launch.")) fmt::print("{}", line);
    at = end;
  }
  fmt::print("\n{}", launch::text(plan));
  std::fflush(stdout);
}

int spawn(const SpawnArguments& arguments) {
  const auto loaded = load(arguments);
  const auto& config = loaded.config.launch;
  const auto machine = launch::this_machine();
  auto options = launch::options_of(loaded.config);
  if (arguments.print_config) print_config(loaded, launch::resolve(options, machine));
  if (arguments.program.empty()) {
    if (arguments.print_config) return exit_done;
    throw ConfigError("PROGRAM is missing: accelmgr spawn [options] -- PROGRAM ARGS");
  }
  Agent agent({.launch = std::move(options),
               .program = resolve_program(arguments.program, machine.environment, !arguments.no_python),
               .prefix = !arguments.no_prefix,
               .log_directory = config.log_directory,
               .max_restarts = config.max_restarts,
               .rendezvous_timeout_s = config.rendezvous_timeout},
              machine);
  const auto [exit_code, clean] = agent.run();
  if (!clean) std::_Exit(exit_code);
  return exit_code;
}

}  // namespace

void add_spawn(CLI::App& app, Action& action, const std::optional<std::vector<std::string>>& program) {
  auto* command = app.add_subcommand("spawn", "Starts a program as several processes that know their ranks");
  auto arguments = std::make_shared<SpawnArguments>();
  const auto option = [&](const std::string& name, const std::string& key, const std::string& help) {
    return command->add_option(name, arguments->values["launch." + key], help + " (launch." + key + ")");
  };
  add_config_options(*command, arguments->config, false);
  option("--nprocs", "nprocs", "Processes on this host; -1: one for each visible GPU, or core")
      ->type_name("N");
  option("--nnodes", "nnodes", "Hosts")->type_name("N");
  option("--node-rank", "node_rank", "Which of them this one is, from 0")->type_name("R");
  option("--rendezvous", "rendezvous", "Where the hosts meet: an address of node 0")->type_name("HOST:PORT");
  option("--backend", "backend", "Of collectives: auto, serial, shm, gloo, nccl")->type_name("B");
  option("--gpus", "gpus", "GPUs by their absolute ids, one for each process")->type_name("LIST");
  option("--start-method", "start_method",
         "Who forks the processes: this one (spawn, fork), or one executed anew (forkserver)")
      ->type_name("M");
  option("--log-dir", "log_directory",
         "Folder for the output of each rank: attempt_0/RANK/stdout.log, stderr.log; and for error.json")
      ->type_name("DIR");
  option("--max-restarts", "max_restarts", "How often all processes are started again after a failure")
      ->type_name("K");
  option("--timeout", "timeout", "Seconds, of collectives")->type_name("S");
  option("--rendezvous-timeout", "rendezvous_timeout", "Seconds within which all hosts must be there")
      ->type_name("S");
  option("--terminate-timeout", "terminate_timeout",
         "Seconds from asking processes to end until they are killed")
      ->type_name("S");
  command->add_flag("--oversubscribe", arguments->oversubscribe,
                    "More processes than GPUs may share them (launch.oversubscribe)");
  command->add_flag("--no-prefix", arguments->no_prefix, "Output without `[rank N] ` before each line");
  command->add_flag("--no-python", arguments->no_python,
                    "Executes PROGRAM itself also when its name ends in .py; otherwise python3 does");
  command->add_flag("--print-config", arguments->print_config,
                    "Prints the resolved configuration first; without PROGRAM nothing else");
  command->prefix_command();  // What follows the first word that is no option is the program's.
  command->footer(
      "accelmgr spawn [OPTIONS] -- PROGRAM ARGS\n\n"
      "Each process gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, "
      "MASTER_PORT "
      "and what else\ntorchrun sets; a program that uses torch.distributed with env:// runs unchanged. When "
      "one fails, on whatever host, all\nare ended: exit code of the first failure, 128 and the number of "
      "its "
      "signal. Ctrl-C is forwarded; a second one kills.");
  command->callback([command, arguments, program, &action] {
    arguments->program = program_of(*command, program);
    action = [arguments] { return spawn(*arguments); };
  });
}

}  // namespace accelmgr::program
