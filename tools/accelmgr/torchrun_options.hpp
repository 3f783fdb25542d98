// The options of torchrun that `accelmgr spawn` accepts.
#pragma once

#include <string>

#include "commands.hpp"

namespace accelmgr::program {

/// "--log-dir,--log_dir": torchrun takes an option with dashes and with underscores.
std::string both_spellings(const std::string& name);

/// Values of torchrun's options that are not keys of the configuration.
struct TorchrunArguments {
  bool module = false;      ///< PROGRAM is the name of a Python module.
  bool standalone = false;  ///< One node, and a free port.
  std::string run_id;       ///< Empty: one is made.
  std::string master_addr, master_port;
  bool asks_for_place = false;  ///< The options ask for a rendezvous that assigns node ranks to the nodes.
};

/// Adds the options. Those that stand for keys go to `config`, the others to `arguments`. When parsed,
/// options without an equivalent throw ConfigError, which says what to use instead.
void add_torchrun_options(CLI::App& command, ConfigArguments& config, TorchrunArguments& arguments);

/// Adds the settings that follow from combinations of torchrun's options. Throws ConfigError.
ConfigArguments with_torchrun(ConfigArguments config, const TorchrunArguments& arguments);

/// Throws ConfigError if the configuration contradicts the options of torchrun.
void check_torchrun(const TorchrunArguments& arguments, const config::LoadedConfig& loaded);

}  // namespace accelmgr::program
