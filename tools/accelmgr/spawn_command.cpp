// accelmgr spawn
#include <fmt/format.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <regex>

#include "accelmgr/errors.hpp"
#include "commands.hpp"
#include "file_limit.hpp"
#include "launcher/agent/agent.hpp"
#include "launcher/agent/job_environment.hpp"
#include "launcher/launch/plan/options.hpp"
#include "program_path.hpp"
#include "standard_output.hpp"
#include "torchrun_options.hpp"

namespace accelmgr::program {
namespace {

struct SpawnArguments {
  ConfigArguments config;
  TorchrunArguments torchrun;
  bool print_config = false;
  bool no_prefix = false;
  bool no_python = false;
  std::vector<std::string> program;
};

/// PROGRAM ARGS: the words that the parser left over, and those after `--`.
std::vector<std::string> program_of(const CLI::App& command,
                                    const std::optional<std::vector<std::string>>& after_dashes) {
  auto words = command.remaining();
  if (!after_dashes) return words;
  if (!words.empty()) words.push_back("--");  // PROGRAM came first, so this `--` is one of its ARGS.
  words.insert(words.end(), after_dashes->begin(), after_dashes->end());
  return words;
}

/// The argv to execute.
std::vector<std::string> command_of(const SpawnArguments& arguments,
                                    const std::map<std::string, std::string>& environment) {
  if (arguments.torchrun.module && arguments.no_python)
    throw ConfigError("--module runs PROGRAM with Python, and --no-python without it; leave out one of them");
  auto words = arguments.program;
  if (arguments.torchrun.module) words.insert(words.begin(), {"python3", "-m"});
  return resolve_program(std::move(words), environment, !arguments.no_python);
}

/// Replaces names of launch options in an error text by the options of this command.
std::string in_flags(const std::string& text, const config::LoadedConfig& loaded) {
  static const std::regex names(R"((^|[^\w.-])(?:option (\w+)|(nprocs|nnodes|node_rank|oversubscribe)\b))");
  return loaded.with_names(std::regex_replace(text, names, "$1launch.$2$3"));
}

/// Prints the launch section of the configuration, then the launch spec that follows from it on this node.
void print_config(const config::LoadedConfig& loaded, const launch::LaunchSpec& spec) {
  const auto all = config::show(loaded);
  for (std::size_t at = 0; at < all.size();) {
    const auto end = all.find('\n', at) + 1;
    const auto line = all.substr(at, end - at);
    if (line.starts_with("launch.")) print_out(line);
    at = end;
  }
  print_out("\n" + launch::text(spec));
}

int spawn(const SpawnArguments& arguments, const config::LoadedConfig& loaded) {
  const auto& config = loaded.config.launch;
  const auto node_info = launch::this_node();
  auto options = launch::options_of(loaded.config);
  if (arguments.print_config) print_config(loaded, launch::resolve(options, node_info));
  if (arguments.program.empty()) {
    if (arguments.print_config) return exit_done;
    throw ConfigError("PROGRAM is missing: accelmgr spawn [options] -- PROGRAM ARGS");
  }
  check_file_limit(32);
  agent::Agent agent({.launch = std::move(options),
                      .program = command_of(arguments, node_info.environment),
                      .prefix = !arguments.no_prefix,
                      .log_directory = config.log_directory,
                      .max_restarts = config.max_restarts,
                      .min_nodes = config.min_nodes,
                      .rendezvous_timeout_s = config.rendezvous_timeout,
                      .run_id = arguments.torchrun.run_id},
                     node_info);
  const auto [exit_code, clean] = agent.run();
  if (!clean) std::_Exit(checked_output(exit_code));
  return exit_code;
}

/// Without --nnodes, or with a range, the nodes are those of the job of SLURM or MPI, if there is one.
config::LoadedConfig load_in_job(const SpawnArguments& arguments) {
  auto config = with_torchrun(arguments.config, arguments.torchrun);
  auto loaded = load(config);
  const auto is_open = [&](const char* key) { return loaded.sources.at(key) == "default"; };
  const bool is_range = loaded.config.launch.min_nodes > 0;  // The number of this node is still to be found.
  if ((!is_open("launch.nnodes") && !is_range) || arguments.torchrun.standalone) return loaded;
  const auto job = agent::job_of(launch::this_node().environment);
  if (!job) return loaded;
  const auto set = [&](const char* key, const std::string& value) {
    if (is_open(key) && !value.empty())
      config.settings.push_back({.assignment = fmt::format("{}={}", key, value), .where = job->variable});
  };
  if (job->rendezvous.empty() && is_open("launch.rendezvous") && is_open("launch.workers"))
    throw ConfigError(fmt::format("{} is {}, but it is not known where these nodes meet: add --rendezvous "
                                  "HOST:PORT, an address of the node with rank 0, or set --nnodes",
                                  job->variable, job->nnodes),
                      "launch.rendezvous");
  set("launch.nnodes", std::to_string(job->nnodes));
  set("launch.node_rank", std::to_string(job->node_rank));
  set("launch.rendezvous", job->rendezvous);
  return load(config);
}

int spawn(const SpawnArguments& arguments) {
  const auto loaded = load_in_job(arguments);
  check_torchrun(arguments.torchrun, loaded);
  try {
    return spawn(arguments, loaded);
  } catch (const ConfigError& error) {
    throw ConfigError(in_flags(error.what(), loaded), error.key());
  }
}

void add_launch_options(CLI::App& command, ConfigArguments& config) {
  const auto option = [&](const std::string& name, const std::string& key, const std::string& help) {
    return add_key_option(command, config, both_spellings(name), "launch." + key, help);
  };
  option("--nprocs", "nprocs", "Processes on this node; -1: one for each visible GPU, or core")
      ->type_name("N");
  option("--nnodes", "nnodes",
         "Nodes; with MIN:MAX the launch goes on with those that are left, at least MIN, and takes new ones "
         "up to "
         "MAX")
      ->type_name("N|MIN:MAX");
  option("--node-rank", "node_rank", "Number of this node, from 0")->type_name("R");
  option("--rendezvous", "rendezvous", "Where the nodes meet: an address of node 0")->type_name("HOST:PORT");
  option("--backend", "backend", "Backend of collectives: auto, serial, shm, gloo, nccl")->type_name("B");
  option("--interface", "interface", "Network interface at which ranks of several nodes connect")
      ->type_name("NAME");
  option("--gpus", "gpus", "GPUs by their absolute ids, one for each process")->type_name("LIST");
  option("--start-method", "start_method",
         "Process that forks the ranks: this one (spawn, fork), or a new one (forkserver)")
      ->type_name("M");
  option("--log-dir", "log_directory",
         "Folder for the output of each rank, attempt_0/RANK/stdout.log and stderr.log, and for "
         "accelmgr-error.json")
      ->type_name("DIR");
  option("--max-restarts", "max_restarts", "How often all processes are started again after a failure")
      ->type_name("K");
  option("--timeout", "timeout",
         "Seconds after which a collective of accelmgr gives up; groups of torch.distributed have their own: "
         "init_process_group(timeout=...)")
      ->type_name("S");
  option("--rendezvous-timeout", "rendezvous_timeout", "Seconds within which all nodes must have joined")
      ->type_name("S");
  option("--terminate-timeout", "terminate_timeout",
         "Seconds from asking processes to end until they are killed")
      ->type_name("S");
  const auto oversubscribe = [&config] {
    config.settings.push_back({.assignment = "launch.oversubscribe=true", .flag = "--oversubscribe"});
  };
  config.flags.emplace("launch.oversubscribe", "--oversubscribe");
  command.add_flag_callback(
      "--oversubscribe", oversubscribe,
      "Lets processes share GPUs if there are more processes than GPUs (launch.oversubscribe)");
}

}  // namespace

void add_spawn(CLI::App& app, Action& action, const std::optional<std::vector<std::string>>& program) {
  auto* command = app.add_subcommand("spawn", "Starts a program as several processes that know their ranks");
  auto arguments = std::make_shared<SpawnArguments>();
  add_config_options(*command, arguments->config, false);
  add_launch_options(*command, arguments->config);
  command->add_flag("--no-prefix", arguments->no_prefix,
                    "Prints output without `[rank N] ` before each line");
  command->add_flag(both_spellings("--no-python"), arguments->no_python,
                    "Executes PROGRAM itself even if its name ends in .py; otherwise python3 runs it");
  command->add_flag("--print-config", arguments->print_config,
                    "Prints the resolved configuration first; without PROGRAM, does nothing else");
  add_torchrun_options(*command, arguments->config, arguments->torchrun);
  command->prefix_command();  // The first word that is not an option is PROGRAM; the rest is not parsed.
  command->footer(
      "accelmgr spawn [OPTIONS] -- PROGRAM ARGS\n\n"
      "Each process gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, "
      "MASTER_PORT and the other\nvariables of torchrun; a program that uses torch.distributed with env:// "
      "runs unchanged. When one fails, on any node,\nall are ended; the exit code is that of the first "
      "failure, "
      "or 128 plus the number of its signal. Ctrl-C is forwarded; a\nsecond one kills.\n"
      "Standard input goes to rank 0 if it is a file or a pipe; other ranks, and all ranks at a terminal, "
      "read nothing.");
  command->callback([command, arguments, program, &action] {
    arguments->program = program_of(*command, program);
    action = [arguments] { return spawn(*arguments); };
  });
}

}  // namespace accelmgr::program
