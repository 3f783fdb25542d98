// The thread in which an agent talks to the agents of the other nodes, so that its event loop never waits for
// the store.
#pragma once

#include <boost/asio/io_context.hpp>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.hpp"
#include "base/unmovable.hpp"
#include "launcher/agent/nodes.hpp"
#include "launcher/distributed/store/tcp_store.hpp"

namespace accelmgr::agent {

/// Called in the thread of the loop.
struct NodeEvents {
  std::function<void(World)> met;               ///< At first, and after begin().
  std::function<void(Nodes::Outcome)> outcome;  ///< Of an attempt, or of the launch (stopped); never running.
  std::function<void(EndedNode)> all_ended;     ///< After NodeLink::ended(): no process is left on any node.
  std::function<void(std::exception_ptr)> broken;  ///< The last event: no world, or the store is lost.
};

/// Only the thread of the loop may call. No call but close() blocks.
class NodeLink : base::Unmovable {
 public:
  using OpenStore = std::function<std::unique_ptr<distributed::TcpStore>()>;

  /// `open` is called in the thread of the link, which blocks all signals.
  NodeLink(boost::asio::io_context& loop, OpenStore open, Node self, double rendezvous_timeout_s,
           NodeEvents events);
  /// close() with a deadline of one second.
  ~NodeLink();

  // Reports to the other nodes. After failed() the event `outcome` comes; it may carry an earlier failure of
  // another node.
  void failed(Failure failure);
  void done();
  void stop(Failure why);
  void ended(EndedNode ended);
  void begin(int attempt);

  /// Leaves the world; no events come from then on. False if the thread still hangs in a call at the
  /// deadline. Then it goes on running, and the program must end without destructors.
  bool close(base::Deadline deadline);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace accelmgr::agent
