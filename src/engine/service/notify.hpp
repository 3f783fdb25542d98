// Tells systemd how a service is, as sd_notify(3) does.
#pragma once

#include <string_view>

namespace accelmgr::service {

/// Sends `state` ("READY=1") to the socket that the environment variable NOTIFY_SOCKET names. Does nothing
/// without the variable. Does not block, and ignores errors: a service runs without its supervisor too.
void notify(std::string_view state) noexcept;

}  // namespace accelmgr::service
