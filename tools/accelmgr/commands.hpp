// The subcommands of the program. Each adds itself to the command line and sets an Action.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/config/loader.hpp"

namespace accelmgr::program {

constexpr int exit_done = 0;
constexpr int exit_failed = 1;
constexpr int exit_usage = 2;
constexpr int exit_interrupted = 130;

/// Runs a subcommand after the command line is parsed; returns the exit code.
using Action = std::function<int()>;

void add_train(CLI::App& app, Action& action);
/// `program`: the words after the first `--`; nullopt if there is no `--`.
void add_spawn(CLI::App& app, Action& action, const std::optional<std::vector<std::string>>& program);
void add_serve(CLI::App& app, Action& action);
/// The option that says which service is meant; client::socket_path() understands its value.
void add_socket_option(CLI::App& command, std::string& socket);
/// status, list, step, events, checkpoint, resize, restart and stop, which ask a service.
void add_service_commands(CLI::App& app, Action& action);
void add_trace(CLI::App& app, Action& action);
void add_top(CLI::App& app, Action& action);
void add_config(CLI::App& app, Action& action);
void add_plot(CLI::App& app, Action& action);
void add_info(CLI::App& app, Action& action);

/// The options that choose a configuration.
struct ConfigArguments {
  std::string file;
  std::vector<config::Setting> settings;     ///< In the order of the command line. The last of a key wins.
  std::map<std::string, std::string> flags;  ///< The option that stands for a key, by key.
};
void add_config_options(CLI::App& command, ConfigArguments& arguments, bool file_required);
/// Adds an option that takes one text. `take` is called in the order of the command line, so that the last of
/// several wins.
CLI::Option* add_text_option(CLI::App& command, const std::string& names,
                             std::function<void(const std::string&)> take, const std::string& help);
/// Adds an option that stands for a key. Errors name the option.
CLI::Option* add_key_option(CLI::App& command, ConfigArguments& arguments, const std::string& name,
                            const std::string& key, const std::string& help);
config::LoadedConfig load(const ConfigArguments& arguments);

}  // namespace accelmgr::program
