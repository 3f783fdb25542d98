// Which program a command line means.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace accelmgr::program {

/// What is to be executed for PROGRAM ARGS: a file that ends in .py is run by `python3`, unless
/// `python` is false. A name without a slash is looked for in PATH of `environment`.
/// Throws ConfigError, which names what was looked for and where, when it is not there or cannot be executed.
std::vector<std::string> resolve_program(std::vector<std::string> program,
                                         const std::map<std::string, std::string>& environment,
                                         bool python = true);

}  // namespace accelmgr::program
