// TCP sockets between the leaders of nodes. They do not block.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.hpp"

namespace accelmgr::collective::tcp {

/// Owns a socket, which is closed in every forked child. A child would keep the connection open after this
/// process has died, so that the peer would not see its death. O_CLOEXEC helps only when the child executes
/// another program.
class Socket {
 public:
  Socket() = default;
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();

  /// Listens at a free port of a numeric address of this node. Throws as ipc::bind_tcp().
  static Socket listening(const std::string& address);
  /// Connects to a name() of a listening socket. Throws SystemError when that fails or the deadline passes.
  static Socket connected(const std::string& name, base::Deadline deadline);
  /// Empty if no connection is waiting. Throws SystemError if descriptors or memory are short.
  Socket accept() const;

  /// The address of a listening socket, as bytes.
  std::string name() const;
  int fd() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

  /// Send or receive as many of the bytes as is possible without blocking, and return how many; 0 if none.
  /// nullopt when the connection has ended: what the peer sent before has been received then.
  std::optional<std::size_t> send(const void* data, std::size_t bytes) const noexcept;
  std::optional<std::size_t> receive(void* data, std::size_t bytes) const noexcept;

 private:
  template <class Open>
  static Socket opened_by(Open&& open) noexcept;

  int fd_ = -1;
};

}  // namespace accelmgr::collective::tcp
