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

/// Makes steps on a thread of the manager, in the memory that the manager has mapped.
void drive(manager::Lease::Local admitted, const manager::Manager& manager, client::Run& run,
           const LocalDriver::Job& job) {
  client::Link link(std::move(admitted.socket), {getpid(), ipc::open_pidfd(getpid())});
  link.take_lease(manager::Tenure::of_service, admitted.number);
  const struct Detached {
    client::Link& link;
    ~Detached() {
      try {
        link.send(protocol::Leave{});
      } catch (const std::exception&) {
        link.close();
      }
    }
  } detached{link};
  link.take_in(std::move(admitted.started));
  const auto view = manager.host_view();
  client::Stepper stepper(manager.config(), view, manager.manifest(), link, [] { return std::string(); });
  client::Checkpoints checkpoints(manager.config(), run, view, manager.manifest(), link);
  Drive drive{manager.session(), stepper, checkpoints, manager.last_checkpoint()};
  job(drive);
}

}  // namespace

void LocalDriver::run(Job job, Done done) {
  is_over_ = has_returned_ = false;
  auto admitted = std::make_shared<manager::Lease::Local>(manager_.lease().drive_here([this] {
    is_over_ = true;
    end_when_done();
  }));
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
      end_when_done();
    });
  }).detach();
  done_ = std::move(done);  // The thread's result comes through the loop of this one, so later.
}

// The session is free soon after the job has returned, or just before this thread hears of that.
void LocalDriver::end_when_done() {
  if (has_returned_ && is_over_) std::exchange(done_, nullptr)(std::exchange(thrown_, nullptr));
}

}  // namespace accelmgr::service
