// The configuration that comes with the program: a run for who has none.
#pragma once

#include <string>

namespace accelmgr::program {

/// The file where it was installed with this program, or in the source tree of the build. Throws ConfigError,
/// which says the command that takes a file, when it is in neither.
std::string shipped_configuration();

}  // namespace accelmgr::program
