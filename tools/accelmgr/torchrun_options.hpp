// The options of torchrun, as `accelmgr spawn` takes them.
#pragma once

#include <string>

#include "commands.hpp"

namespace accelmgr::program {

/// "--log-dir,--log_dir": torchrun takes an option with dashes and with underscores.
std::string both_spellings(const std::string& name);

/// What torchrun's options say that is no key of the configuration.
struct TorchrunArguments {
  bool module = false;      ///< PROGRAM is the name of a Python module.
  bool standalone = false;  ///< One host, and a free port.
  std::string run_id;       ///< Empty: one is made.
  std::string master_addr, master_port;
  bool asks_for_place = false;  ///< A rendezvous that would have told each host its place.
};

/// Options that stand for keys go to `config`, the rest to `arguments`. Those that cannot be mapped throw
/// ConfigError, which says what to use instead.
void add_torchrun_options(CLI::App& command, ConfigArguments& config, TorchrunArguments& arguments);

/// `config` with what torchrun's options say together. Throws ConfigError.
ConfigArguments with_torchrun(ConfigArguments config, const TorchrunArguments& arguments);

/// Throws ConfigError for what contradicts the options of torchrun.
void check_torchrun(const TorchrunArguments& arguments, const config::LoadedConfig& loaded);

}  // namespace accelmgr::program
