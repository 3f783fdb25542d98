#include "manager/supervisor.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <functional>

#include "accelmgr/errors.hpp"
#include "base/log.hpp"
#include "ipc/process.hpp"
#include "ipc/socket.hpp"
#include "protocol/messages.hpp"
#include "session/attempt.hpp"

namespace accelmgr::manager {
namespace {

namespace asio = boost::asio;
using session::Life;

constexpr double launcher_report_s =
    1.0;                             // More than a living launcher takes to reap; a dead one ends the wait.
constexpr double stop_s = 2.0;       // Runners finish what they compute; the launcher kills who has not.
constexpr double host_gone_s = 0.2;  // Nobody waits for what they compute.

/// Calls `ready` each time the descriptor is readable, while it returns true. The descriptor stays its
/// owner's.
class Watch {
 public:
  Watch(asio::io_context& context, int fd, std::function<bool()> ready)
      : descriptor_(context, dup(fd)), ready_(std::move(ready)) {
    arm();
  }

 private:
  void arm() {
    descriptor_.async_wait(asio::posix::stream_descriptor::wait_read,
                           [this](const boost::system::error_code& error) {
                             if (!error && ready_()) arm();
                           });
  }
  asio::posix::stream_descriptor descriptor_;
  std::function<bool()> ready_;
};

}  // namespace

Supervisor::Supervisor(const Config& config, const session::Session& session,
                       const session::Manifest& manifest, ipc::LauncherClient& launcher, int host_socket,
                       int host_pidfd)
    : config_(config),
      session_(session),
      reduction_(session, manifest),
      launcher_(launcher),
      host_socket_(host_socket),
      host_pidfd_(host_pidfd),
      runners_(static_cast<std::size_t>(config.nprocs)) {}

void Supervisor::start_runners() {
  const auto deadline = base::Deadline::in_seconds(config_.start_timeout);
  std::vector<int> pidfds;
  for (int rank = 0; rank < config_.nprocs; ++rank) {
    start_runner(rank, deadline);
    pidfds.push_back(runners_[static_cast<std::size_t>(rank)].pidfd.get());
  }
  protocol::send_started(host_socket_, session_.fds(), launcher_.pid(), launcher_.pidfd(), pidfds);
}

void Supervisor::start_runner(int rank, base::Deadline deadline) {
  auto& record = session_.record(rank);
  auto [ours, theirs] = ipc::socket_pair();
  record.life.store(Life::starting);
  auto fds = session_.fds();
  fds.push_back(theirs.get());
  launcher_.spawn(rank, record.generation.load() + 1, fds);
  runners_[static_cast<std::size_t>(rank)].lifeline = std::move(ours);
  auto& epoch = session_.control().life;
  for (;;) {
    const auto seen = ipc::load(epoch);
    take_launcher_events();
    const auto life = record.life.load();
    if (life == Life::ready && record.pid.load() != 0) return;
    if (life == Life::lost)
      throw RunnerError(
          fmt::format("runner {} {} in phase {}{}{}", rank, ipc::describe_exit(record.exit_status.load()),
                      to_string(record.phase.load()), record.error[0] != 0 ? ": " : "", record.error),
          rank, to_string(record.phase.load()));
    if (deadline.passed())
      throw RunnerError(fmt::format("runner {} was not ready within start_timeout ({} s); it is in phase {}",
                                    rank, config_.start_timeout, to_string(record.phase.load())),
                        rank, to_string(record.phase.load()));
    if (host_gone()) throw SessionError("the host ended while the runners started");
    ipc::wait_changed(epoch, seen, 5'000'000, 0);
  }
}

void Supervisor::take_launcher_events() {
  while (take_launcher_event(base::Deadline::in_seconds(0))) {
  }
}

bool Supervisor::take_launcher_event(base::Deadline deadline) {
  if (auto event = launcher_.next(deadline)) {
    if (auto* started = std::get_if<ipc::Started>(&*event)) {
      auto& runner = runners_[static_cast<std::size_t>(started->rank)];
      runner.pid = started->pid;
      runner.pidfd = std::move(started->pidfd);
      auto& record = session_.record(started->rank);
      record.generation.store(started->generation);
      record.pid.store(started->pid);
    } else if (const auto* ended = std::get_if<ipc::Ended>(&*event)) {
      lost(ended->rank, ended->wait_status);
    }
    return true;
  }
  return false;
}

// Called once the process is known to have ended: only now are its slab and slice used by others.
void Supervisor::lost(int rank, int wait_status) {
  auto& record = session_.record(rank);
  if (record.life.load() == Life::lost) return;
  record.exit_status.store(wait_status);
  record.life.store(Life::lost);
  if (session_.control().stopping.load() == 0) {
    base::set_log_step(session_.counters(session_.word().index).steps + 1);
    base::log().error("runner {} (pid {}) {} in phase {}", rank, record.pid.load(),
                      ipc::describe_exit(wait_status), to_string(record.phase.load()));
  }
  finish_for(rank);
  session_.wake_everyone();
}

void Supervisor::finish_for(int rank) {
  const auto participants = session_.control().request.participants;
  const auto word = session_.word();
  if (word.closed || (participants >> rank & 1) == 0) return;
  if (session::abort_attempt(session_, word.attempt, session::author_supervisor)) return;
  if (!session_.word().committed(participants)) return;
  reduction_.finish_slice(rank, word.attempt);
  session::close_if_over(session_, word.attempt);
}

void Supervisor::run() {
  asio::io_context context;
  std::vector<std::unique_ptr<Watch>> watches;
  auto watch = [&](int fd, std::function<bool()> ready) {
    watches.push_back(std::make_unique<Watch>(context, fd, std::move(ready)));
  };
  const auto stop = [&] {
    context.stop();
    return false;
  };
  watch(host_socket_, stop);  // "stop", or its end: either way.
  watch(host_pidfd_, stop);   // A child that the host forked may hold copies of its socket.
  watch(launcher_.socket(), [&] {
    take_launcher_events();
    return !ipc::has_ended(launcher_.pidfd());
  });
  for (int rank = 0; rank < config_.nprocs; ++rank) {
    watch(runners_[static_cast<std::size_t>(rank)].pidfd.get(), [this, rank] {
      const auto patience = base::Deadline::in_seconds(launcher_report_s);
      while (session_.record(rank).life.load() != Life::lost && take_launcher_event(patience)) {
      }
      lost(rank, SIGKILL);  // No report: the launcher is dead, and its runners were killed with it.
      return false;
    });
  }
  context.run();
  stop_runners();
}

bool Supervisor::host_gone() const noexcept {
  return ipc::is_closed(host_socket_) || ipc::has_ended(host_pidfd_);
}

void Supervisor::stop_runners() {
  session_.control().stopping.store(1);
  session_.wake_everyone();
  const auto deadline = base::Deadline::in_seconds(host_gone() ? host_gone_s : stop_s);
  for (auto& runner : runners_) {
    runner.lifeline.reset();
    if (runner.pidfd) ipc::wait_ended(runner.pidfd.get(), deadline);
  }
  launcher_.stop(base::Deadline::in_seconds(stop_s));
}

}  // namespace accelmgr::manager
