#include "engine/manager/lease.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <chrono>
#include <utility>

#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/checkpoint/folder.hpp"
#include "engine/session/attempt.hpp"

namespace accelmgr::manager {
namespace {

using boost::asio::post;

std::string text_of(const Lease::Host& host) { return fmt::format("process {} ({})", host.pid, host.name); }

}  // namespace

Lease::Lease(boost::asio::io_context& loop, const session::SupervisorView& view, Supervisor& supervisor,
             const std::filesystem::path& checkpoints, Tenure tenure, Events events)
    : loop_(loop),
      view_(view),
      supervisor_(supervisor),
      checkpoints_(checkpoints),
      tenure_(tenure),
      events_(std::move(events)),
      timer_(loop),
      given_(view.session().control().lease.load()) {}

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

std::optional<Driver>& Lease::connect(std::optional<Driver>& driver, base::UniqueFd socket,
                                      base::UniqueFd pidfd, std::uint64_t number) {
  // Posted, because an event must not destroy the driver that calls it.
  const auto left = [this, number](bool detached) {
    post(loop_, [this, number, detached] { leave(number, detached); });
  };
  const auto resize = [this](int ranks) {
    try {
      return supervisor_.resize(ranks);
    } catch (const std::exception& error) {
      return protocol::Resized{error.what()};
    }
  };
  const auto save = [this, number](protocol::Save asked) {
    events_.save(std::move(asked));
    saves_.push_back(number);  // tell_saved() is posted.
  };
  driver.emplace(loop_, std::move(socket), std::move(pidfd), number, view_,
                 Driver::Events{.left = left, .resize = resize, .save = save});
  return driver;
}

void Lease::give(Host host, base::UniqueFd socket) {
  connect(host_driver_, std::move(socket), base::duplicate(host.pidfd.get()), given_ + 1);
  number_ = ++given_;
  host_ = std::move(host);
  detached_ = false;
  state_ = State::driven;
  const auto& control = view_.session().control();
  writes_before_ = control.writes.load();
  buffers_before_ = control.buffer_version.load();
  report();
  tell_who_drives();
  show();
  base::log().info("{} drives the session, with lease {}", text_of(host_), number_);
}

base::UniqueFd Lease::admit(Host host, protocol::Opening opening) {
  auto [ours, theirs] = ipc::socket_pair();
  opening.tenure = tenure_;
  opening.lease = given_ + 1;
  opening.unfinished = unfinished_;
  protocol::send_opening(ours.get(), opening, view_.session().fds());
  protocol::send_started(ours.get(), supervisor_.started());
  give(std::move(host), std::move(ours));
  return std::move(theirs);
}

Lease::Local Lease::drive_here(std::function<void()> over) {
  auto [ours, theirs] = ipc::socket_pair();
  Local local{std::move(theirs), given_ + 1, supervisor_.started()};
  connect(own_driver_, std::move(ours), ipc::open_pidfd(getpid()), given_ + 1);
  ++given_;
  over_ = std::move(over);
  report();
  tell_who_drives();
  base::log().info("the service itself drives the session");
  return local;
}

void Lease::tell_who_drives() {
  view_.control().lease.store(own_driver_                      ? own_driver_->lease()
                              : over_ || state_ == State::free ? 0
                                                               : number_);
}

void Lease::report() {
  std::vector<Driver*> drivers;
  for (auto* driver : {&host_driver_, &own_driver_})
    if (*driver) drivers.push_back(&**driver);
  supervisor_.report_to(std::move(drivers));
}

// Several events of one host may come at once: the later ones find that it has left, or another host.
void Lease::leave(std::uint64_t number, bool detached) {
  if (tenure_ == Tenure::of_host) return events_.freed();
  if (own_driver_ && number == own_driver_->lease()) {
    own_driver_.reset();
    report();
  } else if (host_driver_ && number == host_driver_->lease()) {
    state_ = State::leaving;
    detached_ = detached;
    show();
    host_driver_.reset();
    report();
    base::log().info("{} leaves the session: it has {}", text_of(host_),
                     detached                            ? "detached"
                     : ipc::has_ended(host_.pidfd.get()) ? "ended"
                                                         : "closed its socket, and has not ended yet");
  }
  look();
}

void Lease::asks_again(pid_t pid) {
  if (state_ != State::leaving || host_.pid != pid) return;
  detached_ = true;
  look();
}

void Lease::look() {
  if (over_ && !own_driver_ && end_attempt()) {
    if (std::exchange(settles_host_later_, false)) note_half_written();
    const auto over = std::exchange(over_, nullptr);
    tell_who_drives();
    over();
  }
  if (state_ == State::leaving && host_is_gone()) {
    state_ = State::free;
    tell_who_drives();
    show();
    base::log().info("the session is free after {} steps", steps());
    events_.freed();
  }
  if (state_ != State::leaving && (!over_ || own_driver_)) return;
  timer_.expires_after(std::chrono::nanoseconds(timing::look_ns));
  timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error) look();
  });
}

/// Whether nothing of the leaving host is left in the session.
bool Lease::host_is_gone() {
  if (!detached_ && !ipc::has_ended(host_.pidfd.get())) return false;
  if (over_) {  // The attempt under way is not the host's.
    settles_host_later_ = true;
    return true;
  }
  if (!end_attempt()) return false;
  note_half_written();
  return true;
}

/// Whether no attempt is open: aborts one, or else it is committed, and runners reduce it.
bool Lease::end_attempt() {
  const auto& session = view_.session();
  const auto attempt = session.word().attempt;
  session::abort_attempt(view_, attempt, session::author_supervisor);
  session::close_if_over(view_, attempt);
  return session.word().closed;
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
  const std::lock_guard lock(mutex_);
  untold_.push_back(std::move(saved));
  post(loop_, [this] { tell_of_saved(); });
}

void Lease::tell_of_saved() {
  std::deque<protocol::Saved> untold;
  {
    const std::lock_guard lock(mutex_);
    untold.swap(untold_);
  }
  for (const auto& saved : untold) tell_saved(saved);
}

// Checkpoints are written in the order in which they were asked for.
void Lease::tell_saved(const protocol::Saved& saved) {
  const auto asked_under = saves_.front();
  saves_.pop_front();
  if (saved.error.empty() && checkpoint::is_in(checkpoints_, saved.path)) saved_step_ = saved.step;
  for (auto* driver : {&host_driver_, &own_driver_}) {
    if (!*driver || (*driver)->lease() != asked_under) continue;
    (*driver)->tell(saved);
    (*driver)->send_notices();
  }
  if (asked_under == number_) events_.saved(saved);
}

}  // namespace accelmgr::manager
