// Reserves a port of this node for a server that starts later.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>

#include "accelmgr/errors.hpp"
#include "base/ipc/network.hpp"
#include "base/ipc/tcp.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::test {

/// While this object exists, the kernel gives the port to no process that asks for a free one. bind_tcp() can
/// still bind it, because this socket does not listen. Until a server listens, connections are refused.
class ReservedPort {
 public:
  ReservedPort() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
      throw SystemError("reserving a port", errno);
  }
  int number() const { return ipc::bound_port(socket_.get()); }

 private:
  base::UniqueFd socket_;
};

}  // namespace accelmgr::test
