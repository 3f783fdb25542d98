// The address at which other machines reach this one.
#pragma once

#include <string>

namespace accelmgr::ipc {

/// Returns a numeric address of `interface` ("eth0"). If `interface` is empty, returns the first that exists
/// of: an address of this machine's name that is not a loopback address, the address of the interface with
/// the default route, the address of the first interface that is up and not the loopback, 127.0.0.1. Throws
/// ConfigError, which lists the existing interfaces, when `interface` has no address.
std::string local_address(const std::string& interface);

}  // namespace accelmgr::ipc
