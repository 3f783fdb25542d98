#include "engine/client/link.hpp"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <variant>

#include "accelmgr/errors.hpp"
#include "base/interruption.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/wait_ready.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"

namespace accelmgr::client {

base::Deadline next_look(base::Deadline deadline) noexcept {
  return base::earlier(deadline, base::Deadline::in_seconds(timing::look_s));
}

void Link::take_in(protocol::Started started) {
  fork_server_pidfd_ = std::move(started.fork_server_pidfd);
  for (auto& runner : started.runners) take_in(std::move(runner));
}

bool Link::manager_ended() const noexcept { return !manager_.pidfd || ipc::has_ended(manager_.pidfd.get()); }

bool Link::wait_until_manager_ended(base::Deadline deadline) const noexcept {
  return !manager_.pidfd || ipc::wait_ended(manager_.pidfd.get(), deadline);
}

bool Link::wait_until_others_ended(base::Deadline deadline) const noexcept {
  bool all = !fork_server_pidfd_ || ipc::wait_ended(fork_server_pidfd_.get(), deadline);
  for (const auto& runner : runners_)
    if (runner.pidfd) all = ipc::wait_ended(runner.pidfd.get(), deadline) && all;
  return all;
}

bool Link::runner_ended(int rank) const noexcept {
  return ipc::has_ended(runners_[static_cast<std::size_t>(rank)].pidfd.get());
}

bool Link::fork_server_ended() const noexcept {
  return !fork_server_pidfd_ || ipc::has_ended(fork_server_pidfd_.get());
}

bool Link::holds(int rank, std::uint32_t generation) const noexcept {
  const auto& runner = runners_[static_cast<std::size_t>(rank)];
  return runner.pidfd && runner.generation == generation;
}

void Link::kill_runners() const noexcept {
  for (const auto& runner : runners_) ipc::send_signal(runner.pidfd.get(), SIGKILL);
}

void Link::kill() const noexcept {
  kill_runners();
  ipc::send_signal(manager_.pidfd.get(), SIGKILL);
}

void Link::leave() const noexcept {
  try {
    send(protocol::Leave{});
  } catch (const std::exception&) {
    // The manager has ended already, or reads nothing. It sees the end of this process, or is killed.
  }
}

std::string Link::how_it_ended() const noexcept {
  int status = 0;
  if (is_of_service()) return "the service has ended";
  // Another process may reap the manager. It sends the status at once, unless it has died or is stopped.
  const bool known = status_ ? ipc::wait_ready(status_.get(), POLLIN,
                                               base::Deadline::in_seconds(timing::manager_status_s)) &&
                                   read(status_.get(), &status, sizeof status) == sizeof status
                             : waitpid(manager_pid(), &status, 0) == manager_pid();
  return known ? ipc::describe_exit(status) : "how it ended is not known";
}

std::string Link::end() noexcept {
  if (std::exchange(ended_, true)) return {};
  const auto soon = [] { return base::Deadline::in_seconds(timing::manager_stop_s); };
  const auto deadline = soon();
  const bool by_itself = wait_until_manager_ended(deadline);
  if (!wait_until_others_ended(deadline) || !by_itself) {
    if (is_of_service())
      kill_runners();
    else
      kill();
    ipc::send_signal(fork_server_pidfd_.get(), SIGKILL);
  }
  wait_until_others_ended(soon());
  const bool ended = wait_until_manager_ended(soon());
  if (!is_of_service()) ipc::end_group_of_killed(manager_);  // Its fork server does, unless killed with it.
  manager_.pidfd.reset();                                    // From now on it counts as ended.
  return ended ? how_it_ended() : "it was killed but has not ended: it is blocked in the kernel";
}

void Link::send(const protocol::Request& request) const {
  constexpr const char* gone = "the manager process is gone; recover() starts a new one";
  if (manager_ended()) throw SessionError(gone);
  try {
    protocol::send_request(socket_.get(), request, lease_);
  } catch (const SystemError& error) {
    if (ipc::peer_is_gone(error)) throw SessionError(gone);
    throw;
  }
}

void Link::take_in(protocol::Joined joined) {
  auto& runner = runners_.at(static_cast<std::size_t>(joined.rank));
  runner.generation = joined.generation;
  runner.pidfd = std::move(joined.pidfd);
}

void Link::take_notices() {
  try {
    while (auto notice = protocol::next_notice(socket_.get())) take_in(std::move(*notice));
    left_notice_.clear();
  } catch (const SystemError& error) {
    if (error.code() != EMFILE) throw;
    if (left_notice_.empty())
      base::log().warn("a message of the manager cannot be received: {}", error.what());
    left_notice_ = error.what();
  }
}

void Link::take_in(protocol::Notice notice) {
  if (auto* joined = std::get_if<protocol::Joined>(&notice)) {
    take_in(std::move(*joined));
  } else if (auto* relaunched = std::get_if<protocol::Relaunched>(&notice)) {
    fork_server_pidfd_ = std::move(relaunched->pidfd);
  } else if (auto* resized = std::get_if<protocol::Resized>(&notice)) {
    if (late_resized_ > 0)
      --late_resized_;
    else
      resized_.push_back(std::move(*resized));
  } else {
    saved_.push_back(std::move(std::get<protocol::Saved>(notice)));
  }
}

bool Link::hears_soon(base::Deadline deadline) const noexcept {
  const int socket =
      left_notice_.empty() ? socket_.get() : -1;  // A notice left there makes it always readable.
  pollfd entries[] = {{.fd = socket, .events = POLLIN, .revents = 0},
                      {.fd = manager_.pidfd.get(), .events = POLLIN, .revents = 0}};
  return ipc::wait_any(entries, next_look(deadline));
}

protocol::Resized Link::take_resized(base::Deadline deadline) {
  for (;;) {
    take_notices();
    if (!resized_.empty()) {
      auto answer = std::move(resized_.front());
      resized_.pop_front();
      return answer;
    }
    if (manager_ended()) throw SessionError("the manager process ended before it answered");
    if (deadline.passed() || base::interrupted()) {
      ++late_resized_;
      throw SessionError(left_notice_.empty() ? "the manager process did not answer in time" : left_notice_);
    }
    hears_soon(deadline);
  }
}

std::deque<protocol::Saved> Link::take_saved() {
  take_notices();
  return std::exchange(saved_, {});
}

}  // namespace accelmgr::client
