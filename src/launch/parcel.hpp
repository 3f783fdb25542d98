// A text on its way between two processes: small ones within a packet, larger ones in memory that is passed.
// Sending never waits for the reader, so neither side can hold up the other.
#pragma once

#include <optional>
#include <string>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::launch {

/// To be sent once, or to many: what is large is copied once.
class Parcel {
 public:
  /// Throws UsageError beyond ipc::max_text_bytes; `what` says what it is: "the result of rank 3".
  Parcel(std::string text, const std::string& what);
  /// Throws SystemError (EPIPE: the peer is gone).
  void send(int socket) const;

 private:
  std::string packet_;
  base::UniqueFd memory_;
};

/// nullopt when the peer is gone. Throws SessionError at the deadline, or when something else comes.
std::optional<std::string> receive_parcel(int socket, base::Deadline deadline);

}  // namespace accelmgr::launch
