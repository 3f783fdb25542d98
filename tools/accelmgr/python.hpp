// Finds the Python interpreter that has the package accelmgr.
#pragma once

#include <string>
#include <vector>

namespace accelmgr::program {

/// The first of: the interpreter of the environment into which this program is installed, that of the build,
/// the one in PATH. Sets PYTHONPATH if the package needs it.
std::string python_interpreter();

/// The command of the manager process for models and data in Python (StartOptions::command).
std::vector<std::string> python_manager();

}  // namespace accelmgr::program
