#include "host/processes.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include <utility>

#include "accelmgr/errors.hpp"
#include "config/loader.hpp"
#include "ipc/socket.hpp"
#include "ipc/wait_ready.hpp"
#include "manager/embedding.hpp"
#include "manager/process.hpp"
#include "manager/role.hpp"

namespace accelmgr::host {
namespace {

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

void wait_for_answer(const Processes& processes, base::Deadline deadline,
                     const std::function<bool()>& interrupted) {
  while (interrupted && !deadline.passed() && !processes.hears_within(base::Deadline::in_seconds(0.02))) {
    if (!interrupted()) continue;
    processes.kill();
    throw SessionError("the manager was interrupted while it started");
  }
}

}  // namespace

Processes Processes::start(const Config& config, std::vector<base::UniqueFd>& session_fds,
                           const std::vector<int>& session, const StartOptions& options) {
  Processes processes;
  auto [ours, theirs] = ipc::socket_pair();
  processes.socket_ = std::move(ours);
  processes.manager_ = options.fork ? fork_manager(processes.socket_, theirs) : execute_manager(theirs);
  theirs.reset();
  try {
    protocol::send_configuration(processes.socket_.get(), config::to_yaml(config));
    protocol::send_begin(processes.socket_.get(), session);
    const auto deadline = base::Deadline::in_seconds(config.start_timeout + stop_s);
    wait_for_answer(processes, deadline, options.interrupted);
    auto answer = protocol::receive_answer(processes.socket_.get(), deadline);
    if (const auto* failed = std::get_if<protocol::Failed>(&answer)) protocol::raise(*failed);
    auto& started = std::get<protocol::Started>(answer);
    processes.launcher_pidfd_ = std::move(started.launcher_pidfd);
    for (auto& runner : started.runners) processes.take_in(std::move(runner));
    session_fds = std::move(started.session);
  } catch (const SessionError& error) {
    // Its socket ends a moment before the process does.
    const bool ends = ipc::is_closed(processes.socket_.get());
    const bool died =
        ends && ipc::wait_ended(processes.manager_.pidfd.get(), base::Deadline::in_seconds(stop_s));
    const auto how = processes.end();
    if (died) throw SessionError(fmt::format("{} (the manager process: {})", error.what(), how));
    throw;
  } catch (...) {
    processes.end();
    throw;
  }
  return processes;
}

bool Processes::manager_ended() const noexcept { return ipc::has_ended(manager_.pidfd.get()); }

void Processes::send(const protocol::Request& request) const {
  if (!manager_.pidfd || manager_ended())
    throw SessionError("the manager process is gone; recover() starts a new one");
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
  while (auto notice = protocol::next_notice(socket_.get())) {
    if (auto* joined = std::get_if<protocol::Joined>(&*notice)) {
      take_in(std::move(*joined));
    } else if (auto* relaunched = std::get_if<protocol::Relaunched>(&*notice)) {
      launcher_pidfd_ = std::move(relaunched->pidfd);
    } else if (auto* resized = std::get_if<protocol::Resized>(&*notice)) {
      resized_.push_back(std::move(*resized));
    } else {
      saved_.push_back(std::move(std::get<protocol::Saved>(*notice)));
    }
  }
}

bool Processes::hears_within(base::Deadline deadline) const noexcept {
  return ipc::wait_ready(socket_.get(), POLLIN, deadline) != 0;
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
    if (deadline.passed()) throw SessionError("the manager process did not answer in time");
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
  if (launcher_pidfd_) ipc::send_signal(launcher_pidfd_.get(), SIGKILL);
  if (manager_.pidfd) ipc::send_signal(manager_.pidfd.get(), SIGKILL);
}

std::string Processes::end() noexcept {
  if (!manager_.pidfd) return {};
  const auto deadline = base::Deadline::in_seconds(stop_s);
  bool all = ipc::wait_ended(manager_.pidfd.get(), deadline);
  if (launcher_pidfd_) all = ipc::wait_ended(launcher_pidfd_.get(), deadline) && all;
  for (const auto& runner : runners_)
    if (runner.pidfd) all = ipc::wait_ended(runner.pidfd.get(), deadline) && all;
  if (!all) kill();
  for (const auto& runner : runners_)
    if (runner.pidfd) ipc::wait_ended(runner.pidfd.get(), base::Deadline::in_seconds(stop_s));
  int status = 0;
  if (waitpid(manager_.pid, &status, 0) != manager_.pid) status = 0;
  manager_.pidfd.reset();
  return ipc::describe_exit(status);
}

}  // namespace accelmgr::host
