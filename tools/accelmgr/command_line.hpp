// Help texts, and errors of a command line.
#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace accelmgr::program {

/// Help without the second spelling of an option (`--log_dir` for `--log-dir`).
class Formatter : public CLI::Formatter {
 public:
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override;
};

/// The error text for an unknown option or subcommand ("accelmgr train: unknown option '--stesp'; did you
/// mean '--steps'?"), or for a missing subcommand. Empty if there is no such error.
std::string misunderstood(const CLI::App& app);

}  // namespace accelmgr::program
