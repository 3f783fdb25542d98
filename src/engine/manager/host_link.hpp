// The link of the manager to its host: the socket between them, and the pidfd of the host.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "engine/protocol/messages.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::manager {

/// Used by one thread.
class HostLink {
 public:
  /// If `pidfd` is empty, opens that of the process which made the socket: the host. `lease`: that of a host
  /// that has attached; its requests must state it. Throws SystemError, and SessionError when the host has
  /// ended already. Does not own `socket`.
  HostLink(int socket, base::UniqueFd pidfd, std::uint64_t lease = 0);

  int socket() const noexcept { return socket_; }
  int pidfd() const noexcept { return pidfd_.get(); }
  bool is_gone() const noexcept;

  /// See protocol::next_request().
  auto next_request() const { return protocol::next_request(socket_, lease_); }
  /// Answers the host that all runners wait for the first trigger.
  void started(const protocol::Started& started) const { protocol::send_started(socket_, started); }

  /// Queues a notice for send_notices(), which keeps the order. A queued Joined is dropped if its runner is
  /// replaced before the host reads.
  void tell(protocol::Notice notice);
  /// Sends as many notices as the socket has room for, and wakes the host after each. Does not block.
  void send_notices(const session::View& view);

 private:
  int socket_;
  base::UniqueFd pidfd_;
  std::uint64_t lease_;
  std::deque<protocol::Notice> notices_;
};

}  // namespace accelmgr::manager
