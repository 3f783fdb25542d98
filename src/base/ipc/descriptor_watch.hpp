// Calls a function when a descriptor is readable, from an Asio loop.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <functional>
#include <memory>
#include <utility>

#include "base/ipc/wait_ready.hpp"
#include "base/unique_fd.hpp"
#include "base/unmovable.hpp"

namespace accelmgr::ipc {

/// Calls `ready` on the thread of the loop each time the descriptor is readable, until `ready` returns false
/// or the watch is destroyed. May be destroyed inside `ready`. Watches a duplicate: the caller keeps `fd`.
class Watch : base::Unmovable {
 public:
  Watch(boost::asio::io_context& context, int fd, std::function<bool()> ready)
      : state_(std::make_shared<State>(context, base::duplicate(fd), std::move(ready))) {
    arm(state_);
  }
  ~Watch() {
    state_->alive = false;
    boost::system::error_code ignored;
    state_->descriptor.close(ignored);
  }

 private:
  struct State {
    State(boost::asio::io_context& context, base::UniqueFd fd, std::function<bool()> f)
        : descriptor(context, fd.get()), ready(std::move(f)) {
      fd.release();  // `descriptor` owns it now.
    }
    /// Asio may deliver a queued event of a descriptor that was closed meanwhile to the next descriptor. So
    /// the event alone proves nothing.
    bool readable() { return wait_ready(descriptor.native_handle(), POLLIN, base::Deadline::at_ns(0)) != 0; }
    boost::asio::posix::stream_descriptor descriptor;
    std::function<bool()> ready;
    bool alive = true;
  };
  static void arm(const std::shared_ptr<State>& state) {
    state->descriptor.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                                 [state](const boost::system::error_code& error) {
                                   if (error || !state->alive) return;
                                   if (!state->readable() || (state->ready() && state->alive)) arm(state);
                                 });
  }
  std::shared_ptr<State> state_;
};

}  // namespace accelmgr::ipc
