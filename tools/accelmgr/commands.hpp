// The subcommands of the program: each adds itself to the command line and returns an exit code when called.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/loader.hpp"

namespace accelmgr::program {

constexpr int exit_done = 0;
constexpr int exit_failed = 1;
constexpr int exit_usage = 2;
constexpr int exit_interrupted = 130;

/// What a subcommand does once the command line is parsed.
using Action = std::function<int()>;

void add_train(CLI::App& app, Action& action);
/// `program`: the words after `--`, if there was one.
void add_spawn(CLI::App& app, Action& action, const std::optional<std::vector<std::string>>& program);
void add_config(CLI::App& app, Action& action);
void add_plot(CLI::App& app, Action& action);
void add_info(CLI::App& app, Action& action);

/// The options that choose a configuration.
struct ConfigArguments {
  std::string file;
  std::vector<config::Setting> settings;     ///< In the order in which they were typed: the last counts.
  std::map<std::string, std::string> flags;  ///< Options that stand for a key, by key.
};
void add_config_options(CLI::App& command, ConfigArguments& arguments, bool file_required);
/// An option that takes one text, in the order of the command line; of several the last counts.
CLI::Option* add_text_option(CLI::App& command, const std::string& names,
                             std::function<void(const std::string&)> take, const std::string& help);
/// An option that stands for a key; errors name it as it was typed.
CLI::Option* add_key_option(CLI::App& command, ConfigArguments& arguments, const std::string& name,
                            const std::string& key, const std::string& help);
config::LoadedConfig load(const ConfigArguments& arguments);

}  // namespace accelmgr::program
