// The thread in which an agent talks to those of the other hosts: its event loop never waits for a store.
#pragma once

#include <boost/asio/io_context.hpp>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.hpp"
#include "distributed/tcp_store.hpp"
#include "nodes.hpp"

namespace accelmgr::program {

/// Called in the loop.
struct NodeEvents {
  std::function<void(World)> met;
  std::function<void(Nodes::Outcome)> outcome;  ///< Of an attempt, or of the whole (stopped); never running.
  std::function<void(EndedNode)> all_ended;     ///< After NodeLink::ended(): no process is left on any host.
  std::function<void()> begun;                  ///< After NodeLink::begin().
  std::function<void(std::exception_ptr)> broken;  ///< The last event: nobody met, or the store is lost.
};

/// Used by the loop's thread alone.
class NodeLink {
 public:
  using OpenStore = std::function<std::unique_ptr<distributed::TcpStore>()>;

  /// `open` is called in the thread of the link, which blocks all signals.
  NodeLink(boost::asio::io_context& loop, OpenStore open, int node_rank, Node self,
           double rendezvous_timeout_s, NodeEvents events);
  /// As close() with a bound of one second.
  ~NodeLink();
  NodeLink(const NodeLink&) = delete;
  NodeLink& operator=(const NodeLink&) = delete;

  // Reports; after one of a failure comes the outcome, which may be that of an earlier one of another host.
  void failed(RankFailure failure);
  void done();
  void stop(RankFailure why);
  void ended(EndedNode ended);
  void begin(int attempt);

  /// Leaves; no event comes any more. False when the thread still hangs in a call at the deadline: it is left
  /// to itself, and the program must end without destructors of the whole.
  bool close(base::Deadline deadline);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace accelmgr::program
