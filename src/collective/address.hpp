// The address at which other hosts reach this one.
#pragma once

#include <string>

namespace accelmgr::collective {

/// Numeric; of `interface` ("eth0"); or, if that is empty: of this host's name, if that is no loopback, else
/// of the interface with the default route, else of the first that is up. The loopback's where there is no
/// other. Throws ConfigError, which lists the interfaces there are, when `interface` has no address.
std::string local_address(const std::string& interface);

}  // namespace accelmgr::collective
