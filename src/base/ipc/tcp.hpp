// TCP addresses, and sockets that are bound or connected to them.
#pragma once

#include <string>

#include "base/clock.hpp"
#include "base/ipc/host_port.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::ipc {

/// A TCP socket that listens at an address of this machine; port 0 means any free one. From then on no other
/// program can bind the port. Throws ConfigError, which names the address, if it is in use, is not an address
/// of this machine or cannot be resolved; SystemError if descriptors or memory are short.
base::UniqueFd bind_tcp(const std::string& host, int port);
/// As bind_tcp(), but if no address of the host can be bound it returns an empty socket, and `code` is an
/// errno value; otherwise `code` is 0.
base::UniqueFd try_bind_tcp(const std::string& host, int port, int& code);

/// The numeric address of a bound socket. Throws SystemError.
HostPort address_of(int socket);

/// The numeric address of the peer of a connected TCP socket; {"", 0} for any other descriptor.
HostPort peer_of(int fd) noexcept;

/// The address by which a process of this machine reaches a socket bound to `address`: loopback for the
/// wildcard addresses, otherwise `address` itself.
HostPort reachable(const HostPort& address);

/// Blocks until a server accepts connections there; returns its numeric address. Throws SessionError, which
/// names the address and the last error, when the deadline passes first or the wait is interrupted.
HostPort wait_for_listener(const std::string& host, int port, base::Deadline deadline);

}  // namespace accelmgr::ipc
