// Finds the Python interpreter that has the package accelmgr.
#pragma once

#include <string>
#include <vector>

#include "accelmgr/config.hpp"

namespace accelmgr::program {

/// The first of: the interpreter of the environment into which this program is installed, that of the build,
/// the one in PATH. Sets PYTHONPATH if the package needs it.
std::string python_interpreter();

/// The command of the manager process for models and data in Python (StartOptions::command).
std::vector<std::string> python_manager();

/// Whether the model or the data of `config` are made in Python.
bool is_of_python(const Config& config);

/// Executes the same interpreter as a service; `arguments` are those of accelmgr._process.child.serve().
/// Throws SystemError.
[[noreturn]] void execute_python_service(const std::vector<std::string>& arguments);

}  // namespace accelmgr::program
