#include "host/processes.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/interruption.hpp"
#include "base/log.hpp"
#include "config/loader.hpp"
#include "ipc/socket.hpp"
#include "ipc/wait_ready.hpp"
#include "launch/forkserver.hpp"
#include "manager/embedding.hpp"
#include "manager/process.hpp"
#include "manager/role.hpp"

namespace accelmgr::host {
namespace {

constexpr double look_s = 0.02;  // How long an interruption may go unseen.
constexpr double status_s = 1.0;
constexpr double stop_s = 6.0;  // More than the manager takes to end its runners by force.

ipc::Child execute_manager(const base::UniqueFd& socket) {
  const std::pair<int, int> inherited[] = {{socket.get(), manager::role_socket}};
  return ipc::execute_self({manager::role_argument}, inherited);
}

ipc::Child fork_manager(base::UniqueFd& ours, base::UniqueFd& theirs) {
  ipc::Child child;
  manager::embedding().around_fork([&] {
    child = ipc::fork_self([&] {
      ours.reset();
      manager::embedding().forked();
      manager::run(std::move(theirs));
    });
  });
  return child;
}

std::optional<int> reaped_status(pid_t pid) noexcept {
  int status = 0;
  return waitpid(pid, &status, 0) == pid ? std::optional(status) : std::nullopt;
}

/// The forkserver tells at once; one that has died or is stopped does not.
std::optional<int> told_status(int pipe) noexcept {
  int status = 0;
  if (ipc::wait_ready(pipe, POLLIN, base::Deadline::in_seconds(status_s)) == 0) return std::nullopt;
  return read(pipe, &status, sizeof status) == sizeof status ? std::optional(status) : std::nullopt;
}

}  // namespace

void Processes::make_manager(StartMethod method) {
  if (method == StartMethod::forkserver) {
    auto served = launch::fork_from_server(manager::server_role);
    socket_ = std::move(served.socket);
    manager_ = std::move(served.process);
    manager_status_ = std::move(served.status);
  } else {
    auto [ours, theirs] = ipc::socket_pair();
    socket_ = std::move(ours);
    manager_ = method == StartMethod::fork ? fork_manager(socket_, theirs) : execute_manager(theirs);
  }
}

protocol::Started Processes::receive_started(base::Deadline deadline,
                                             const std::function<bool()>& interrupted,
                                             const Prepared& prepared) {
  for (;;) {
    while (interrupted && !deadline.passed() && !hears_within(deadline)) {
      if (!interrupted()) continue;
      kill();
      throw SessionError("the manager was interrupted while it started");
    }
    if (ipc::wait_ready(socket_.get(), POLLIN, deadline) == 0)
      throw SessionError(
          "the manager process was not ready within start_timeout: it still makes the model and the data "
          "source");
    auto answer = protocol::receive_answer(socket_.get(), deadline);
    if (const auto* failed = std::get_if<protocol::Failed>(&answer)) protocol::raise(*failed);
    if (auto* started = std::get_if<protocol::Started>(&answer)) return std::move(*started);
    prepared(std::move(std::get<protocol::Prepared>(answer).session));
    protocol::take_note_of_prepared(socket_.get());
  }
}

void Processes::bring_up(const Config& config, const std::vector<int>& session, const StartOptions& options,
                         const Prepared& prepared) {
  make_manager(options.method);
  try {
    protocol::send_configuration(socket_.get(), config::to_yaml(config));
    protocol::send_begin(socket_.get(), session);
    const auto deadline = base::Deadline::in_seconds(config.start_timeout + stop_s);
    auto started = receive_started(deadline, options.interrupted, prepared);
    launcher_pidfd_ = std::move(started.launcher_pidfd);
    for (auto& runner : started.runners) take_in(std::move(runner));
  } catch (const SessionError& error) {
    // Its socket ends a moment before the process does.
    const bool ends = ipc::is_closed(socket_.get());
    const bool died = ends && ipc::wait_ended(manager_.pidfd.get(), base::Deadline::in_seconds(stop_s));
    socket_.reset();  // Should it still live: there is no host for it.
    const auto how = end();
    if (died) throw SessionError(fmt::format("{} (the manager process: {})", error.what(), how));
    throw;
  } catch (...) {
    socket_.reset();
    end();
    throw;
  }
}

Processes Processes::start(const Config& config, const StartOptions& options, const Prepared& prepared) {
  Processes processes;
  processes.bring_up(config, {}, options, prepared);
  return processes;
}

Processes Processes::start_over(const Config& config, StartMethod method, const std::vector<int>& session) {
  Processes processes;
  processes.bring_up(config, session, {.interrupted = base::interrupted, .method = method, .prepared = {}},
                     {});
  return processes;
}

bool Processes::manager_ended() const noexcept {
  return !manager_.pidfd || ipc::has_ended(manager_.pidfd.get());
}

void Processes::wait_until_manager_ended(base::Deadline deadline) const noexcept {
  while (!manager_ended() && !deadline.passed() && !base::interrupted()) {
    const auto look = base::Deadline::in_seconds(look_s);
    ipc::wait_ended(manager_.pidfd.get(), look.ns() < deadline.ns() ? look : deadline);
  }
}

void Processes::send(const protocol::Request& request) const {
  if (manager_ended()) throw SessionError("the manager process is gone; recover() starts a new one");
  protocol::send_request(socket_.get(), request);
}

bool Processes::runner_ended(int rank) const noexcept {
  return ipc::has_ended(runners_[static_cast<std::size_t>(rank)].pidfd.get());
}

bool Processes::holds(int rank, std::uint32_t generation) const noexcept {
  const auto& runner = runners_[static_cast<std::size_t>(rank)];
  return runner.pidfd && runner.generation == generation;
}

void Processes::take_in(protocol::Joined joined) {
  auto& runner = runners_.at(static_cast<std::size_t>(joined.rank));
  runner.generation = joined.generation;
  runner.pidfd = std::move(joined.pidfd);
}

void Processes::take_notices() {
  try {
    while (auto notice = protocol::next_notice(socket_.get())) take_in(std::move(*notice));
    unread_.clear();
  } catch (const SystemError& error) {
    if (error.code() != EMFILE) throw;
    if (unread_.empty()) base::log().warn("what the manager says cannot be taken in: {}", error.what());
    unread_ = error.what();
  }
}

void Processes::take_in(protocol::Notice notice) {
  if (auto* joined = std::get_if<protocol::Joined>(&notice)) {
    take_in(std::move(*joined));
  } else if (auto* relaunched = std::get_if<protocol::Relaunched>(&notice)) {
    launcher_pidfd_ = std::move(relaunched->pidfd);
  } else if (auto* resized = std::get_if<protocol::Resized>(&notice)) {
    if (late_resized_ > 0)
      --late_resized_;
    else
      resized_.push_back(std::move(*resized));
  } else {
    saved_.push_back(std::move(std::get<protocol::Saved>(notice)));
  }
}

bool Processes::hears_within(base::Deadline deadline) const noexcept {
  const auto look = base::Deadline::in_seconds(look_s);
  const int socket = unread_.empty() ? socket_.get() : -1;  // It has something to say all the time.
  return ipc::wait_ready(socket, POLLIN, look.ns() < deadline.ns() ? look : deadline) != 0;
}

protocol::Resized Processes::take_resized(base::Deadline deadline) {
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
      throw SessionError(unread_.empty() ? "the manager process did not answer in time" : unread_);
    }
    hears_within(deadline);
  }
}

std::deque<protocol::Saved> Processes::take_saved() {
  take_notices();
  return std::exchange(saved_, {});
}

void Processes::ask_to_stop() const noexcept {
  try {
    send(protocol::Stop{});
  } catch (const Error&) {
    // The manager has ended already, or reads nothing: it is ended by force.
  }
}

void Processes::kill() const noexcept {
  for (const auto& runner : runners_) ipc::send_signal(runner.pidfd.get(), SIGKILL);
  ipc::send_signal(manager_.pidfd.get(), SIGKILL);
}

std::string Processes::end() noexcept {
  if (!manager_.pidfd) return {};
  const auto deadline = base::Deadline::in_seconds(stop_s);
  bool all = ipc::wait_ended(manager_.pidfd.get(), deadline);
  if (launcher_pidfd_) all = ipc::wait_ended(launcher_pidfd_.get(), deadline) && all;
  for (const auto& runner : runners_)
    if (runner.pidfd) all = ipc::wait_ended(runner.pidfd.get(), deadline) && all;
  if (!all) {
    kill();
    ipc::send_signal(launcher_pidfd_.get(), SIGKILL);
  }
  for (const auto& runner : runners_)
    if (runner.pidfd) ipc::wait_ended(runner.pidfd.get(), base::Deadline::in_seconds(stop_s));
  const bool manager_ended = ipc::wait_ended(manager_.pidfd.get(), base::Deadline::in_seconds(stop_s));
  manager_.pidfd.reset();
  if (!manager_ended) return "it was killed and does not end: it sits in the kernel";
  const auto status = manager_status_ ? told_status(manager_status_.get()) : reaped_status(manager_.pid);
  return status ? ipc::describe_exit(*status) : "how it ended is not known";
}

}  // namespace accelmgr::host
