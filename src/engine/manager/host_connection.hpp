// The connection of a manager to its host, on a loop: it takes the host's requests, answers them, and reports
// the host's end.
#pragma once

#include <boost/asio/io_context.hpp>
#include <functional>

#include "base/refusals.hpp"
#include "engine/manager/descriptor_watch.hpp"
#include "engine/manager/host_link.hpp"
#include "engine/manager/supervisor.hpp"
#include "engine/protocol/messages.hpp"

namespace accelmgr::manager {

/// Used by the thread of its loop. Does not block.
class HostConnection {
 public:
  /// None may destroy this object. Those of the host's end may come more than once.
  struct Events {
    std::function<void()> stop{};    ///< The host asks to stop. Empty: that is refused.
    std::function<void()> detach{};  ///< The host has given up its mappings. Empty: that is refused.
    std::function<void()> closed;    ///< The host has closed its socket.
    /// The process of the host has ended. A child of the host may hold a copy of its socket, so only this
    /// tells that the host is gone.
    std::function<void()> ended;
    /// If it throws, the host is told that the checkpoint was not written.
    std::function<void(protocol::Save)> save;
  };
  /// `link` and `supervisor` must outlive this.
  HostConnection(boost::asio::io_context& loop, HostLink& link, const session::SupervisorView& view,
                 Supervisor& supervisor, Events events);

  /// Takes in now what the host has sent, and whether it has ended, as the loop would later.
  void catch_up();
  /// Sends a notice as soon as the host reads.
  void tell(protocol::Notice notice);

 private:
  bool serve_request();
  bool serve(protocol::Received& request);
  void serve(const protocol::Resize& size);
  void serve(protocol::Save save);
  bool leave(const std::function<void()>& event, const char* request);

  HostLink& link_;
  session::SupervisorView view_;
  Supervisor& supervisor_;
  Events events_;
  base::Refusals refusals_;
  Watch socket_, process_;
};

}  // namespace accelmgr::manager
