// Finds and loads the plug-in.
#pragma once

#include "collective/gloo/plugin.hpp"

namespace accelmgr::collective::gloo {

/// Loads it once a process. Throws UsageError with unavailable_because().
const Plugin& plugin();

}  // namespace accelmgr::collective::gloo
