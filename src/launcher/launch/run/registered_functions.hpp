// The functions registered by name.
#pragma once

#include "accelmgr/launch.hpp"

namespace accelmgr::launch {

/// Throws ConfigError for an unknown name; the text lists the registered names and the nearest one.
const Function& registered_function(const std::string& name);

}  // namespace accelmgr::launch
