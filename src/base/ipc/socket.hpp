// Messages with descriptors between processes, over pairs of connected SOCK_SEQPACKET sockets.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/timing.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::ipc {

inline constexpr std::size_t max_packet_bytes = 64 * 1024;
inline constexpr std::size_t max_packet_fds = 64;
/// The most that a text that goes as a memfd may have.
inline constexpr std::size_t max_text_bytes = 64 * 1024 * 1024;

/// Two connected ends, both close-on-exec.
std::pair<base::UniqueFd, base::UniqueFd> socket_pair();

/// Sends one packet of 1 to max_packet_bytes bytes, with duplicates of up to max_packet_fds descriptors.
/// Blocks while the socket is full because the peer does not read. Throws SessionError on the deadline,
/// SystemError (EPIPE: the peer is gone), and UsageError if the packet is empty or too large. Raises no
/// SIGPIPE.
void send(int socket, std::string_view bytes, std::span<const int> fds = {},
          base::Deadline deadline = base::Deadline::in_seconds(timing::send_s));

/// Whether an error of send() says that the peer is gone. Other errors are this process's own: not enough
/// memory, or too many descriptors in flight.
bool peer_is_gone(const SystemError& error) noexcept;

struct Message {
  std::string bytes;
  std::vector<base::UniqueFd> fds;  ///< In the sender's order, close-on-exec.
  std::string missing{};            ///< Not empty: why receive_what_fits() dropped the descriptors.
};

/// Blocks for the next packet; nullopt if the peer is gone and everything it sent has been read. Throws
/// SessionError on the deadline, and for a packet that send() would not have sent, which is dropped. Throws
/// SystemError (EMFILE) if this process has too many open descriptors to take the packet's; the packet then
/// stays in the socket. Only one thread may receive from a socket.
std::optional<Message> receive(int socket, base::Deadline deadline);

/// Like receive(), but if this process has too many open descriptors it drops those of the packet and sets
/// `missing`.
std::optional<Message> receive_what_fits(int socket, base::Deadline deadline);

/// Whether receive() would return at once: there is a packet, or the peer is gone.
bool is_readable(int socket) noexcept;

/// Whether the peer is gone. Packets that it sent may still wait to be received.
bool is_closed(int socket) noexcept;

}  // namespace accelmgr::ipc
