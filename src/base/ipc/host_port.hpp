// "HOST:PORT", with IPv6 addresses in brackets.
#pragma once

#include <string>
#include <string_view>

namespace accelmgr::ipc {

struct HostPort {
  std::string host;  ///< Without brackets.
  int port = 0;

  bool operator==(const HostPort&) const = default;
};

inline constexpr int highest_port = 65535;

/// Throws ConfigError, which quotes the text and says what is wrong with it. Port 0 ("any free port") is
/// accepted only if `lowest_port` is 0.
HostPort parse_host_port(std::string_view text, int lowest_port = 1);

/// "HOST:PORT", with brackets around a host that contains colons.
std::string text(const HostPort& address);

}  // namespace accelmgr::ipc
