// The subcommands of the program: each adds itself to the command line and returns an exit code when called.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <optional>
#include <string>
#include <vector>

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
  std::vector<std::string> sets;
};
void add_config_options(CLI::App& command, ConfigArguments& arguments, bool file_required);

}  // namespace accelmgr::program
