// One that drives the session, as its manager sees it: a host, or a thread of a service. The manager takes
// its requests, tells it what it must know, and sees its end.
#pragma once

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <deque>
#include <functional>

#include "base/ipc/descriptor_watch.hpp"
#include "base/refusals.hpp"
#include "base/unique_fd.hpp"
#include "engine/protocol/messages.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::manager {

/// Used by the thread of its loop. Does not block.
class Driver {
 public:
  /// None may destroy this object.
  struct Events {
    /// `detached`: it has said that it uses the session no more. Otherwise it has closed its socket, or its
    /// process has ended: a child may hold a copy of its socket. May come more than once.
    std::function<void(bool detached)> left;
    std::function<protocol::Resized(int ranks)> resize;
    /// If it throws, the driver is told that the checkpoint was not written.
    std::function<void(protocol::Save)> save;
  };
  /// lease: its requests must state it.
  Driver(boost::asio::io_context& loop, base::UniqueFd socket, base::UniqueFd pidfd, std::uint64_t lease,
         const session::SupervisorView& view, Events events);

  std::uint64_t lease() const noexcept { return lease_; }

  /// Takes in now what it has sent, and whether it has ended, as the loop would later.
  void catch_up();

  /// Queues a notice for send_notices(), which keeps the order. A queued Joined is dropped if its runner is
  /// replaced before the driver reads.
  void tell(protocol::Notice notice);
  /// Sends as many notices as the socket has room for, and wakes the driver after each.
  void send_notices();

 private:
  bool serve_request();
  bool serve(protocol::Received& request);
  void serve(protocol::Save save);

  base::UniqueFd socket_, pidfd_;
  std::uint64_t lease_;
  session::SupervisorView view_;
  Events events_;
  std::deque<protocol::Notice> notices_;
  base::Refusals refusals_;
  ipc::Watch requests_, process_;
};

}  // namespace accelmgr::manager
