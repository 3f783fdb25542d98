// Finds the program to execute.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace accelmgr::program {

/// The argv for PROGRAM ARGS. A file that ends in .py is run by `python3`, unless `python` is false. A name
/// without a slash is looked up in PATH of `environment`. Throws ConfigError, which names the program and the
/// places that were searched, if it is not found or cannot be executed.
std::vector<std::string> resolve_program(std::vector<std::string> program,
                                         const std::map<std::string, std::string>& environment,
                                         bool python = true);

}  // namespace accelmgr::program
