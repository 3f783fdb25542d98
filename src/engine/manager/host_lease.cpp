#include "engine/manager/host_lease.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <chrono>
#include <memory>
#include <utility>

#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/checkpoint/folder.hpp"
#include "engine/session/attempt.hpp"

namespace accelmgr::manager {
namespace {

std::string text_of(const Lease::Host& host) { return fmt::format("process {} ({})", host.pid, host.name); }

}  // namespace

Lease::Lease(boost::asio::io_context& loop, const session::SupervisorView& view, Supervisor& supervisor,
             const std::filesystem::path& checkpoints, Events events)
    : loop_(loop),
      view_(view),
      supervisor_(supervisor),
      checkpoints_(checkpoints),
      events_(std::move(events)),
      timer_(loop) {}

Lease::Standing Lease::standing() const {
  const std::lock_guard lock(mutex_);
  return shown_;
}

/// Shows others how it stands now.
void Lease::show() {
  Standing now{state_, number_, host_.name, host_.pid, unfinished_};
  const std::lock_guard lock(mutex_);
  shown_ = std::move(now);
}

base::UniqueFd Lease::admit(Host host, protocol::Attached attached) {
  auto [ours, theirs] = ipc::socket_pair();
  attached.lease = number_ + 1;
  attached.unfinished = unfinished_;
  protocol::send_attached(ours.get(), attached, view_.session().fds());
  protocol::send_started(ours.get(), supervisor_.started());
  give(std::move(host), std::move(ours));
  return std::move(theirs);
}

Lease::Local Lease::admit_this_process() {
  auto [ours, theirs] = ipc::socket_pair();
  Local local{std::move(theirs), number_ + 1, supervisor_.started()};
  give({.name = "the service itself", .pid = getpid(), .pidfd = ipc::open_pidfd(getpid())}, std::move(ours));
  return local;
}

void Lease::give(Host host, base::UniqueFd ours) {
  const auto number = number_ + 1;
  auto& link = link_.emplace(ours.get(), base::duplicate(host.pidfd.get()), number);
  // Posted, because an event must not destroy the connection that calls it.
  const auto leaving = [this, number](bool detached) {
    return [this, number, detached] {
      boost::asio::post(loop_, [this, number, detached] { leave(number, detached); });
    };
  };
  connection_.emplace(loop_, link, view_, supervisor_,
                      HostConnection::Events{.stop = {},
                                             .detach = leaving(true),
                                             .closed = leaving(false),
                                             .ended = leaving(false),
                                             .save = [this](protocol::Save save) {
                                               events_.save(std::move(save));
                                               saves_.push_back(number_);  // tell_saved() is posted.
                                             }});
  socket_ = std::move(ours);
  number_ = number;
  host_ = std::move(host);
  detached_ = false;
  state_ = State::driven;
  const auto& control = view_.session().control();
  writes_before_ = control.writes.load();
  buffers_before_ = control.buffer_version.load();
  supervisor_.report_to(&link);
  view_.control().lease.store(number);
  show();
  base::log().info("{} drives the session, with lease {}", text_of(host_), number);
}

// Several events of one host may come at once: the later ones find that it has left, or another host.
void Lease::leave(std::uint64_t number, bool detached) {
  if (number != number_) return;
  if (state_ == State::driven) {
    state_ = State::leaving;
    show();
    // A thread of this process that drives the session ends before its socket does.
    detached_ = detached || host_.pid == getpid();
    supervisor_.report_to(nullptr);
    connection_.reset();
    link_.reset();
    socket_.reset();
    base::log().info("{} leaves the session: it has {}", text_of(host_),
                     detached                            ? "detached"
                     : ipc::has_ended(host_.pidfd.get()) ? "ended"
                                                         : "closed its socket, and has not ended yet");
  }
  look();
}

void Lease::returns(pid_t pid) {
  if (state_ != State::leaving || host_.pid != pid) return;
  detached_ = true;
  look();
}

void Lease::look() {
  if (state_ != State::leaving) return;
  const auto& session = view_.session();
  const auto attempt = session.word().attempt;
  const bool is_gone = detached_ || ipc::has_ended(host_.pidfd.get());
  if (is_gone) {
    session::abort_attempt(view_, attempt, session::author_supervisor);
    session::close_if_over(view_, attempt);  // Otherwise it is committed, and runners reduce it.
  }
  if (!is_gone || !session.word().closed) {
    timer_.expires_after(std::chrono::nanoseconds(timing::look_ns));
    timer_.async_wait([this](const boost::system::error_code& error) {
      if (!error) look();
    });
    return;
  }
  note_half_written();
  view_.control().lease.store(0);
  state_ = State::free;
  show();
  base::log().info("the session is free after {} steps", steps());
  events_.freed();
}

std::uint64_t Lease::steps() const noexcept {
  const auto& session = view_.session();
  return session.counters(session.word().index).steps;
}

void Lease::note_half_written() {
  const auto& control = view_.session().control();
  if (control.writes.load() != writes_before_) half_.parameters = false;
  if (control.buffer_version.load() / 2 > buffers_before_ / 2)
    half_.buffers = false;  // Odd: a write under way.
  view_.control().half_written.store(half_.parameters);
  if (!half_.parameters && !half_.buffers) unfinished_.clear();
  // A thread of this process writes neither, and leaves nothing half done.
  if (host_.pid == getpid()) return;
  const auto half = view_.settle_host();
  if (!half.parameters && !half.buffers) return;
  half_ = {.parameters = half_.parameters || half.parameters, .buffers = half_.buffers || half.buffers};
  view_.control().half_written.store(half_.parameters);
  unfinished_ = fmt::format("{} ended while it wrote {}: they are half new and half old", text_of(host_),
                            !half_.buffers      ? "parameters"
                            : !half_.parameters ? "buffers"
                                                : "parameters and buffers");
  base::log().warn("{}", unfinished_);
}

void Lease::saved(protocol::Saved saved) {
  auto shared = std::make_shared<protocol::Saved>(std::move(saved));
  boost::asio::post(loop_, [this, shared] { tell_saved(*shared); });
}

// Checkpoints are written in the order in which they were asked for.
void Lease::tell_saved(const protocol::Saved& saved) {
  const auto asked_under = saves_.front();
  saves_.pop_front();
  if (saved.error.empty() && checkpoint::is_in(checkpoints_, saved.path)) saved_step_ = saved.step;
  if (asked_under != number_) return;
  if (connection_) connection_->tell(saved);
  events_.saved(saved);
}

}  // namespace accelmgr::manager
