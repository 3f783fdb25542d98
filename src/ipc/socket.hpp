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
#include "base/unique_fd.hpp"

namespace accelmgr::ipc {

inline constexpr std::size_t max_packet_bytes = 64 * 1024;
inline constexpr std::size_t max_packet_fds = 64;
inline constexpr std::size_t max_text_bytes = 64 * 1024 * 1024;
inline constexpr double send_timeout_s = 10;

/// Two connected ends, both close-on-exec.
std::pair<base::UniqueFd, base::UniqueFd> socket_pair();

/// Sends one packet of 1 to max_packet_bytes bytes, with duplicates of up to max_packet_fds descriptors.
/// Blocks while the peer does not read; SessionError when the deadline passes. Throws SystemError (EPIPE: the
/// peer is gone), UsageError for a packet that is empty or too large. Raises no SIGPIPE.
void send(int socket, std::string_view bytes, std::span<const int> fds = {},
          base::Deadline deadline = base::Deadline::in_seconds(send_timeout_s));

/// Whether an error of send() says that the peer is gone. Any other is of this process: want of memory, or
/// too many descriptors under way.
bool peer_is_gone(const SystemError& error) noexcept;

struct Message {
  std::string bytes;
  std::vector<base::UniqueFd> fds;  ///< In the sender's order, close-on-exec.
};

/// The next packet; nullopt when the peer is gone and everything it sent has been read. Throws SessionError
/// when the deadline passes; SystemError (EMFILE) when this process has no room for the packet's descriptors:
/// the packet is still there then. One thread per end.
std::optional<Message> receive(int socket, base::Deadline deadline);

/// The next packet, which is there, without its descriptors: for who has no room for them.
std::string receive_bytes(int socket);

/// Whether receive() would return at once: there is a packet, or the peer is gone.
bool is_readable(int socket) noexcept;

/// A text of up to max_text_bytes, in as many packets as it takes; received by receive_text().
void send_text(int socket, std::string_view text);

/// nullopt when the peer is gone before the text began; SessionError within the text, or when what comes is
/// no text.
std::optional<std::string> receive_text(int socket, base::Deadline deadline);

/// Whether the peer is gone; packets of it may still wait to be received.
bool is_closed(int socket) noexcept;

}  // namespace accelmgr::ipc
