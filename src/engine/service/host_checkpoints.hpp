// Requests for checkpoints that the host of a session is to write, because they hold its optimizer. The host
// finds out between its steps (Handle::checkpoint_requested()), so the answers come later.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <list>

#include "base/clock.hpp"
#include "engine/manager/lease.hpp"
#include "engine/service/request.hpp"

namespace accelmgr::service {

/// Used by the thread of its loop. Does not block.
class HostCheckpoints {
 public:
  /// `lease` must outlive this.
  HostCheckpoints(boost::asio::io_context& loop, manager::Lease& lease) : lease_(lease), timer_(loop) {}

  /// Asks the host that drives the session. `respond` gets the checkpoint, or why there is none `until` then.
  void ask(Respond respond, base::Deadline until);
  /// Call it when a checkpoint of the host was written, or failed.
  void saved(const protocol::Saved& saved);
  /// Call it when the host has left.
  void left();

 private:
  struct Asked {
    Respond respond;
    base::Deadline until;
    std::size_t earlier;  ///< Checkpoints that the host had asked for before, and that do not answer it.
    std::uint64_t step;   ///< Nor does one of an earlier step.
  };
  void answer_all(const Response& response);
  void look_for_late();

  manager::Lease& lease_;
  boost::asio::steady_timer timer_;
  std::list<Asked> asked_;
};

/// The answer that tells how a checkpoint was written. `Written`: protocol::Saved or CheckpointWritten.
template <class Written>
Response response_to(const Written& written);

}  // namespace accelmgr::service
