// The backends that a context, or a group, can ask for.
#pragma once

#include <string>
#include <vector>

namespace accelmgr::distributed {

/// "auto": shm on one host, gloo over several. It is none of the available ones, but may be asked for.
inline constexpr const char* auto_backend = "auto";

/// Throws ConfigError when it cannot be used here: unknown (lists those that can, and the nearest), or known
/// and not to be had (with the reason).
void check_backend(const std::string& backend);

}  // namespace accelmgr::distributed
