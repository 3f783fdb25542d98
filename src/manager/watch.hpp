// A descriptor that an Asio loop waits for.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <functional>
#include <memory>
#include <utility>

#include "base/unique_fd.hpp"
#include "ipc/wait_ready.hpp"

namespace accelmgr::manager {

/// Calls `ready` each time the descriptor is readable, while it returns true and the watch lives. The
/// descriptor stays its owner's. May be destroyed inside `ready`.
class Watch {
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
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  struct State {
    State(boost::asio::io_context& context, base::UniqueFd fd, std::function<bool()> f)
        : descriptor(context, fd.get()), ready(std::move(f)) {
      fd.release();  // The descriptor's now.
    }
    /// Asio may hand an event that is queued for a descriptor, and that is closed by then, to the next one.
    bool readable() {
      return ipc::wait_ready(descriptor.native_handle(), POLLIN, base::Deadline::at_ns(0)) != 0;
    }
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

}  // namespace accelmgr::manager
