// What is wrong with a command line, in words.
#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace accelmgr::program {

/// Help without the second spelling of an option (`--log_dir` for `--log-dir`).
class Formatter : public CLI::Formatter {
 public:
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override;
};

/// What the parser has left over, or missed: an option or a subcommand that is unknown ("accelmgr train:
/// unknown option '--stesp'; did you mean '--steps'?"), or a subcommand that is missing. Empty: nothing.
std::string misunderstood(const CLI::App& app);

}  // namespace accelmgr::program
