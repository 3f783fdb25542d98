// The functions registered by name.
#pragma once

#include "accelmgr/launch.hpp"

namespace accelmgr::launch {

/// Throws ConfigError, which lists the registered ones and the nearest.
const Function& registered_function(const std::string& name);
std::vector<std::string> registered_functions();

}  // namespace accelmgr::launch
