// A text sent between two processes. A small text travels in a packet, a larger one in a memfd that the
// packet carries. Sending never waits for the reader, so neither side can block the other.
#pragma once

#include <optional>
#include <string>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::launch {

/// Can be sent to many processes; a large text is copied only once.
class TextMessage {
 public:
  /// Throws UsageError for more than ipc::max_text_bytes. `what` names the text in the error: "the result of
  /// rank 3".
  TextMessage(std::string text, const std::string& what);
  /// Does not block. Throws SystemError, with EPIPE if the peer is gone.
  void send(int socket) const;

 private:
  std::string packet_;
  base::UniqueFd memory_;
};

/// Blocks until the text is here. nullopt if the peer is gone. Throws SessionError when the deadline passes
/// or if the message is not a TextMessage.
std::optional<std::string> receive_text_message(int socket, base::Deadline deadline);

}  // namespace accelmgr::launch
