#include "service/local_driver.hpp"

#include <unistd.h>

#include <boost/asio/post.hpp>
#include <thread>
#include <utility>
#include <variant>

#include "accelmgr/errors.hpp"
#include "base/timing.hpp"
#include "client/link.hpp"
#include "config/loader.hpp"
#include "ipc/process.hpp"
#include "protocol/messages.hpp"

namespace accelmgr::service {
namespace {

/// A session's host without a process of its own: it uses the memory that the manager has mapped.
void drive(base::UniqueFd socket, const manager::ServedManager& manager, client::Run& run,
           const LocalDriver::Job& job) {
  const auto soon = base::Deadline::in_seconds(timing::first_words_s);
  const auto lease = protocol::receive_attached(socket.get(), soon).lease;
  auto begun = protocol::receive_answer(socket.get(), soon);
  client::Link link(std::move(socket), {getpid(), ipc::open_pidfd(getpid())}, lease);
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
  auto* started = std::get_if<protocol::Started>(&begun);
  if (started == nullptr) throw SessionError("the session has no runners");
  link.take_in(std::move(*started));
  const auto view = manager.host_view();
  client::Stepper stepper(manager.config(), view, manager.manifest(), link, [] { return std::string(); });
  client::Checkpoints checkpoints(manager.config(), run, view, manager.manifest(), link);
  Drive drive{stepper, checkpoints};
  job(drive);
}

}  // namespace

void LocalDriver::run(Job job, Done done) {
  auto socket = std::make_shared<base::UniqueFd>(manager_.lease().admit(
      {.name = "the service itself", .pid = getpid(), .pidfd = ipc::open_pidfd(getpid())},
      config::to_yaml(manager_.config()), run_.id));
  thrown_ = nullptr;
  has_returned_ = false;
  std::thread([this, socket, job = std::move(job)] {
    std::exception_ptr thrown;
    try {
      drive(std::move(*socket), manager_, run_, job);
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
