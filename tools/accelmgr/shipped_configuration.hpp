// The configuration that comes with the program, for users who have none.
#pragma once

#include <string>

namespace accelmgr::program {

/// Its path: where this program is installed, or in the source tree of the build. Throws ConfigError, which
/// shows the command that takes a file, if it is in neither.
std::string shipped_configuration();

}  // namespace accelmgr::program
