// TCP addresses of this machine, and sockets that listen at them.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

namespace accelmgr::ipc {

/// The name of this machine; empty if the kernel does not tell.
std::string host_name();

/// The numeric host of an IPv4 or IPv6 address, without brackets, with the zone if it has one; empty for
/// other families.
std::string host_of(const sockaddr* address);

/// The port of an IPv4 or IPv6 address; 0 for other families.
int port_of(const sockaddr* address) noexcept;

/// The port of a bound socket. Throws SystemError.
int bound_port(int socket);

/// Binds a stream socket and listens. Lingering connections of an earlier run do not keep the port in use. A
/// wildcard address of IPv6 accepts IPv4 too. Returns 0 or an errno value.
int bind_and_listen(int socket, const sockaddr* address, socklen_t length) noexcept;

/// An address of a network interface of this machine.
struct InterfaceAddress {
  std::string interface;  ///< "eth0"
  std::string host;       ///< Without brackets and zone.
  bool up = false;
  bool loopback = false;
  bool link_local = false;  ///< IPv6 that is valid only together with its interface.
};

/// All addresses, IPv4 before IPv6. Throws SystemError.
std::vector<InterfaceAddress> interface_addresses();

}  // namespace accelmgr::ipc
