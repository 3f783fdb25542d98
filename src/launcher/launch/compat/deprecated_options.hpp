// Deprecated options of paddle's spawn, translated into the present ones.
#pragma once

#include <map>
#include <string>

namespace accelmgr::launch {

/// Returns `texts` with deprecated options replaced by the present ones. Logs a warning for each deprecated
/// option. Where the present option is given too, it wins. Invalid values throw ConfigError.
std::map<std::string, std::string> without_deprecated(std::map<std::string, std::string> texts);

}  // namespace accelmgr::launch
