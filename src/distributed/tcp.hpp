// TCP addresses, and sockets that are bound or connected to them.
#pragma once

#include <string>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "launch/host_port.hpp"

namespace accelmgr::distributed {

using launch::HostPort;

/// A TCP socket that listens at an address of this host; port 0: a free one. Nobody else can bind the port
/// from now on. Throws ConfigError, which names the address: in use, not of this host, a name that nobody
/// knows.
base::UniqueFd bind_tcp(const std::string& host, int port);

/// Of a bound socket, in numbers. Throws SystemError.
HostPort address_of(int socket);
inline int port_of(int socket) { return address_of(socket).port; }

/// Of a connected TCP socket, in numbers; nothing ({"", 0}) of any other descriptor.
HostPort peer_of(int fd) noexcept;

/// Where a process of this host reaches a socket bound to `address`: itself, but for the addresses that mean
/// all of this host's.
HostPort reachable(const HostPort& address);

/// Blocks until somebody accepts connections there; returns its address in numbers. Throws SessionError,
/// which names the address and what stood in the way, when the deadline passes first.
HostPort wait_for_listener(const std::string& host, int port, base::Deadline deadline);

}  // namespace accelmgr::distributed
