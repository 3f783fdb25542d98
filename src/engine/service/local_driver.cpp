#include "engine/service/local_driver.hpp"

#include <unistd.h>

#include <boost/asio/post.hpp>
#include <thread>
#include <utility>

#include "base/ipc/process.hpp"
#include "engine/client/link.hpp"
#include "engine/protocol/messages.hpp"

namespace accelmgr::service {
namespace {

/// A session's host without a process of its own: it uses the memory that the manager has mapped.
void drive(manager::Lease::Local admitted, const manager::ServedManager& manager, client::Run& run,
           const LocalDriver::Job& job) {
  client::Link link(std::move(admitted.socket), {getpid(), ipc::open_pidfd(getpid())}, admitted.lease);
  const struct Detached {
    client::Link& link;
    ~Detached() {
      try {
        link.send(protocol::Detach{});
      } catch (const std::exception&) {
        link.close();
      }
    }
  } detached{link};
  link.take_in(std::move(admitted.started));
  const auto view = manager.host_view();
  client::Stepper stepper(manager.config(), view, manager.manifest(), link, [] { return std::string(); });
  client::Checkpoints checkpoints(manager.config(), run, view, manager.manifest(), link);
  Drive drive{stepper, checkpoints, manager.last_checkpoint()};
  job(drive);
}

}  // namespace

void LocalDriver::run(Job job, Done done) {
  auto admitted = std::make_shared<manager::Lease::Local>(manager_.lease().admit_this_process());
  thrown_ = nullptr;
  has_returned_ = false;
  std::thread([this, admitted, job = std::move(job)] {
    std::exception_ptr thrown;
    try {
      drive(std::move(*admitted), manager_, run_, job);
    } catch (...) {
      thrown = std::current_exception();
    }
    boost::asio::post(loop_, [this, thrown] {
      thrown_ = thrown;
      has_returned_ = true;
      if (manager_.lease().state() == manager::Lease::State::free) freed();
    });
  }).detach();
  done_ = std::move(done);  // The thread's result comes through the loop of this one, so later.
}

// The lease is free soon after the job has returned, or just before this thread hears of that.
void LocalDriver::freed() {
  if (!has_returned_ || !done_) return;
  has_returned_ = false;
  std::exchange(done_, nullptr)(std::exchange(thrown_, nullptr));
}

}  // namespace accelmgr::service
