#include "base/ipc/socket.hpp"

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "base/ipc/wait_ready.hpp"

namespace accelmgr::ipc {
namespace {

void check_packet(std::string_view bytes, std::size_t fds) {
  // A receiver cannot tell an empty packet from the end of the stream.
  if (bytes.empty() || bytes.size() > max_packet_bytes)
    throw UsageError(fmt::format("a packet must have 1 to {} bytes, not {}", max_packet_bytes, bytes.size()));
  if (fds > max_packet_fds)
    throw UsageError(fmt::format("a packet can pass at most {} descriptors, not {}", max_packet_fds, fds));
}

union Control {
  char bytes[CMSG_SPACE(sizeof(int) * max_packet_fds)];
  cmsghdr alignment;
};

std::vector<base::UniqueFd> take_fds(msghdr& header) {
  std::vector<base::UniqueFd> fds;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = CMSG_LEN(0); at + sizeof(int) <= part->cmsg_len; at += sizeof(int)) {
      int fd;
      std::memcpy(&fd, reinterpret_cast<const char*>(part) + at, sizeof fd);
      fds.emplace_back(fd);
    }
  }
  return fds;
}

[[noreturn]] void no_room_for_fds(int socket) {
  throw SystemError(
      fmt::format("the descriptors of a message on socket {} do not fit into process {}", socket, getpid()),
      EMFILE);
}

/// Takes the first packet off the socket and drops its descriptors. Returns its size.
ssize_t take_packet(int socket, char* data, std::size_t bytes) {
  ssize_t received = 0;
  do {
    received = recv(socket, data, bytes, MSG_DONTWAIT);
  } while (received < 0 && (errno == EINTR || errno == ECONNRESET));
  if (received < 0) throw SystemError(fmt::format("receiving from socket {}", socket), errno);
  return received;
}

}  // namespace

std::pair<base::UniqueFd, base::UniqueFd> socket_pair() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    throw SystemError("socketpair", errno);
  return {base::UniqueFd(ends[0]), base::UniqueFd(ends[1])};
}

void send(int socket, std::string_view bytes, std::span<const int> fds, base::Deadline deadline) {
  check_packet(bytes, fds.size());
  iovec data{.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  Control control{};
  if (!fds.empty()) {
    header.msg_control = control.bytes;
    header.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(part), fds.data(), fds.size_bytes());
  }
  while (sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN)
      throw SystemError(fmt::format("sending {} bytes over socket {}", bytes.size(), socket), errno);
    if (wait_ready(socket, POLLOUT, deadline) == 0)
      throw SessionError(
          fmt::format("the peer of socket {} has stopped reading: {} bytes could not be sent in time", socket,
                      bytes.size()));
  }
}

bool peer_is_gone(const SystemError& error) noexcept {
  return error.code() == EPIPE || error.code() == ECONNRESET;
}

std::optional<Message> receive(int socket, base::Deadline deadline) {
  Message message;
  message.bytes.resize(max_packet_bytes);
  for (;;) {
    iovec data{.iov_base = message.bytes.data(), .iov_len = message.bytes.size()};
    Control control{};
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.bytes;
    header.msg_controllen = sizeof control.bytes;
    // Peek first, which installs the descriptors: if there is no room for them, the packet is not lost.
    const auto received = recvmsg(socket, &header, MSG_PEEK | MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (received >= 0) message.fds = take_fds(header);  // This process owns them now.
    if (received == 0) {
      if (is_closed(socket)) return std::nullopt;
      take_packet(socket, nullptr, 0);
      throw SessionError(
          fmt::format("a packet on socket {} has no bytes; it must have 1 to {}", socket, max_packet_bytes));
    }
    if (received > 0) {
      if ((header.msg_flags & MSG_CTRUNC) != 0) no_room_for_fds(socket);
      take_packet(socket, nullptr, 0);
      if ((header.msg_flags & MSG_TRUNC) != 0)
        throw SessionError(
            fmt::format("a packet on socket {} is larger than {} bytes", socket, max_packet_bytes));
      message.bytes.resize(static_cast<std::size_t>(received));
      return message;
    }
    // ECONNRESET: the peer closed its end without reading all of this process's packets. It comes once,
    // before the packets that are left to read.
    if (errno == EINTR || errno == ECONNRESET) continue;
    if (errno != EAGAIN) throw SystemError(fmt::format("receiving from socket {}", socket), errno);
    if (wait_ready(socket, POLLIN, deadline) == 0)
      throw SessionError(fmt::format("no message came over socket {} in time", socket));
  }
}

std::optional<Message> receive_what_fits(int socket, base::Deadline deadline) {
  try {
    return receive(socket, deadline);
  } catch (const SystemError& error) {
    if (error.code() != EMFILE) throw;
    Message message{std::string(max_packet_bytes, 0), {}, error.what()};
    message.bytes.resize(
        static_cast<std::size_t>(take_packet(socket, message.bytes.data(), message.bytes.size())));
    return message;
  }
}

bool is_readable(int socket) noexcept { return wait_ready(socket, POLLIN, base::Deadline::at_ns(0)) != 0; }

// A text is sent as a packet with its 64-bit length, then packets with its bytes.
bool is_closed(int socket) noexcept { return wait_ready(socket, POLLRDHUP, base::Deadline::at_ns(0)) != 0; }

}  // namespace accelmgr::ipc
