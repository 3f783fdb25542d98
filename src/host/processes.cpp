#include "host/processes.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>

#include "accelmgr/errors.hpp"
#include "config/loader.hpp"
#include "ipc/socket.hpp"
#include "manager/role.hpp"

namespace accelmgr::host {
namespace {

constexpr double stop_s = 6.0;  // More than the manager takes to end its runners by force.

}  // namespace

Processes Processes::start(const Config& config, std::vector<base::UniqueFd>& session_fds) {
  Processes processes;
  auto [ours, theirs] = ipc::socket_pair();
  const std::pair<int, int> inherited[] = {{theirs.get(), manager::role_socket}};
  processes.socket_ = std::move(ours);
  processes.manager_ = ipc::execute_self({manager::role_argument}, inherited);
  theirs.reset();
  try {
    protocol::send_configuration(processes.socket_.get(), config::to_yaml(config));
    auto answer = protocol::receive_answer(processes.socket_.get(),
                                           base::Deadline::in_seconds(config.start_timeout + stop_s));
    if (const auto* failed = std::get_if<protocol::Failed>(&answer)) protocol::raise(*failed);
    auto& started = std::get<protocol::Started>(answer);
    processes.launcher_pid_ = started.launcher_pid;
    processes.launcher_pidfd_ = std::move(started.launcher_pidfd);
    processes.runner_pidfds_ = std::move(started.runner_pidfds);
    session_fds = std::move(started.session);
  } catch (const SessionError& error) {
    const bool died = processes.manager_ended();
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

bool Processes::launcher_ended() const noexcept { return ipc::has_ended(launcher_pidfd_.get()); }

bool Processes::runner_ended(int rank) const noexcept {
  return ipc::has_ended(runner_pidfds_[static_cast<std::size_t>(rank)].get());
}

void Processes::kill_runner(int rank) const noexcept {
  ipc::send_signal(runner_pidfds_[static_cast<std::size_t>(rank)].get(), SIGKILL);
}

void Processes::kill() const noexcept {
  for (const auto& runner : runner_pidfds_) ipc::send_signal(runner.get(), SIGKILL);
  if (launcher_pidfd_) ipc::send_signal(launcher_pidfd_.get(), SIGKILL);
  if (manager_.pidfd) ipc::send_signal(manager_.pidfd.get(), SIGKILL);
}

std::string Processes::end() noexcept {
  if (!manager_.pidfd) return {};
  const auto deadline = base::Deadline::in_seconds(stop_s);
  bool all = ipc::wait_ended(manager_.pidfd.get(), deadline);
  if (launcher_pidfd_) all = ipc::wait_ended(launcher_pidfd_.get(), deadline) && all;
  for (const auto& runner : runner_pidfds_) all = ipc::wait_ended(runner.get(), deadline) && all;
  if (!all) kill();
  for (const auto& runner : runner_pidfds_) ipc::wait_ended(runner.get(), base::Deadline::in_seconds(stop_s));
  int status = 0;
  if (waitpid(manager_.pid, &status, 0) != manager_.pid) status = 0;
  manager_.pidfd.reset();
  return ipc::describe_exit(status);
}

}  // namespace accelmgr::host
