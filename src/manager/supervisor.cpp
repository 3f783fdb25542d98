#include "manager/supervisor.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/post.hpp>

#include "accelmgr/errors.hpp"
#include "base/log.hpp"
#include "ipc/process.hpp"
#include "ipc/socket.hpp"
#include "session/attempt.hpp"

namespace accelmgr::manager {
namespace {

using session::Life;

constexpr double stop_s = 2.0;       // Runners finish what they compute; the launcher kills who has not.
constexpr double host_gone_s = 0.2;  // Nobody waits for what they compute.
constexpr double kill_s = 10.0;      // Who lives on for so long after SIGKILL sits in the kernel for good.

}  // namespace

Supervisor::Supervisor(const Config& config, const session::Session& session,
                       const session::Manifest& manifest, ipc::LauncherClient launcher, MakeLauncher relaunch,
                       Save save, Reading reading, int host_socket, int host_pidfd)
    : config_(config),
      session_(session),
      reduction_(session, manifest),
      launcher_(std::move(launcher)),
      relaunch_(std::move(relaunch)),
      save_(std::move(save)),
      host_socket_(host_socket),
      host_pidfd_(host_pidfd),
      ticker_(context_),
      start_timer_(context_),
      runners_(static_cast<std::size_t>(session.ranks())),
      start_deadline_(base::Deadline::in_seconds(config.start_timeout)),
      policy_(config.runners),
      watchdog_(config, session),
      reading_(std::move(reading)),
      source_watch_(session, config.data.kind) {}

void Supervisor::run() {
  try {
    serve();
  } catch (...) {
    launcher_->stop(base::Deadline::in_seconds(stop_s));  // And all runners with it.
    throw;
  }
  stop_runners();
}

void Supervisor::serve() {
  const auto stop = [this] {
    context_.stop();
    return false;
  };
  host_watch_ =
      std::make_unique<Watch>(context_, host_pidfd_, stop);  // A child of the host may hold its socket.
  host_socket_watch_ = std::make_unique<Watch>(context_, host_socket_, [this] {
    host_request();
    return true;
  });
  const auto team = session_.control().team.load();
  for (int rank = 0; rank < session_.ranks(); ++rank)
    if ((team >> rank & 1) != 0) want(rank, 0);
  watch_launcher();
  tick();
  start_next();
  context_.run();
  if (!answered_) throw SessionError("the host ended while the runners started");
}

std::uint64_t Supervisor::step_under_way() const noexcept {
  return session_.counters(session_.word().index).steps + 1;
}

void Supervisor::watch_launcher() {
  launcher_watch_ = std::make_unique<Watch>(context_, launcher_->socket(), [this] {
    take_launcher_events();
    return !ipc::is_closed(launcher_->socket());
  });
  launcher_end_ = std::make_unique<Watch>(context_, launcher_->pidfd(), [this] {
    launcher_ended();
    return false;
  });
}

// ---- Starting ----

void Supervisor::want(int rank, std::int64_t delay_ns) {
  wanted_.push_back({rank, base::now_ns() + delay_ns});
}

// Staged: a runner is forked when the one before is ready.
void Supervisor::start_next() {
  if (starting_ || wanted_.empty() || launcher_lost_ || session_.control().given_up.load() != 0) return;
  const auto next = std::min_element(wanted_.begin(), wanted_.end(), [](const Wanted& a, const Wanted& b) {
    return a.not_before_ns < b.not_before_ns;
  });
  const auto wait_ns = next->not_before_ns - base::now_ns();
  if (wait_ns > 0) {
    start_timer_.expires_after(std::chrono::nanoseconds(wait_ns));
    start_timer_.async_wait([this](const boost::system::error_code& error) {
      if (!error) start_next();
    });
    return;
  }
  const int rank = next->rank;
  wanted_.erase(next);
  start_runner(rank);
}

void Supervisor::start_runner(int rank) {
  auto& record = session_.record(rank);
  runner(rank) = {};
  starting_ = rank;
  starting_ns_ = base::now_ns();
  record.pid.store(0);
  record.log.written.store(0);  // Its predecessor's lines are in the incident.
  record.phase.store(session::Phase::init);
  record.life.store(Life::starting);
  try {
    spawn(rank);
  } catch (const SystemError& error) {
    if (!ipc::peer_is_gone(error)) return not_started(rank, error.what());
    starting_.reset();  // The launcher is gone: its pidfd tells, and all are started by the next.
  } catch (const SessionError& error) {
    not_started(rank, error.what());
  }
}

void Supervisor::spawn(int rank) {
  auto [ours, theirs] = ipc::socket_pair();
  runner(rank).lifeline = std::move(ours);
  runner(rank).said_ready = std::make_unique<Watch>(context_, runner(rank).lifeline.get(), [this, rank] {
    // Its end without a word is told by its pidfd.
    if (!ipc::is_closed(runner(rank).lifeline.get())) runner_ready(rank);
    return false;
  });
  auto fds = session_.fds();
  fds.push_back(theirs.get());
  launcher_->spawn(rank, session_.record(rank).generation.load() + 1, fds);
}

// There is no process: for the policy it is one that was lost while it started.
void Supervisor::not_started(int rank, const std::string& why) {
  runner(rank).verdict = fmt::format("it could not be started: {}", why);
  lost(rank, W_EXITCODE(ipc::exit_not_forked, 0));
}

bool Supervisor::take_launcher_event(base::Deadline deadline) {
  auto event = launcher_->next(deadline);
  if (!event) return false;
  if (auto* started = std::get_if<ipc::Started>(&*event)) {
    auto& record = session_.record(started->rank);
    record.generation.store(started->generation);
    record.pid.store(started->pid);
    const int rank = started->rank;
    runner(rank).pidfd = std::move(started->pidfd);
    base::log().info("runner {} (pid {}) was forked by the launcher (pid {})", rank, started->pid,
                     launcher_->pid());
    watch_runner(rank);
  } else if (const auto* ended = std::get_if<ipc::Ended>(&*event)) {
    // A late one tells of a process that counts as lost already, while the next of its rank is on its way.
    const auto& record = session_.record(ended->rank);
    const bool not_forked = ended->pid == 0 && ended->generation == record.generation.load() + 1;
    if (not_forked)
      not_started(ended->rank, SystemError("forking it", ended->error).what());
    else if (ended->pid == record.pid.load())
      lost(ended->rank, ended->wait_status);
  }
  return true;
}

void Supervisor::watch_runner(int rank) {
  try {
    runner(rank).end = std::make_unique<Watch>(context_, runner(rank).pidfd.get(), [this, rank] {
      runner_ended(rank);
      return false;
    });
  } catch (const SystemError& error) {
    ipc::send_signal(runner(rank).pidfd.get(), SIGKILL);
    ipc::wait_ended(runner(rank).pidfd.get(), base::Deadline::in_seconds(launcher_report_s));
    not_started(rank, error.what());
  }
}

void Supervisor::take_launcher_events() {
  while (take_launcher_event(base::Deadline::at_ns(0))) {
  }
}

void Supervisor::runner_ready(int rank) {
  // The launcher told of it before it could say anything; that may still be on its way.
  const auto patience = base::Deadline::in_seconds(launcher_report_s);
  const auto begun_ns = starting_ns_;
  while (begun_ns == starting_ns_ && !runner(rank).pidfd && take_launcher_event(patience)) {
  }
  if (begun_ns != starting_ns_ || starting_ != rank || !runner(rank).pidfd) return;
  starting_.reset();
  auto& record = session_.record(rank);
  record.life.store(Life::ready);
  ipc::advance(session_.control().life);
  base::log().info("runner {} (pid {}) is ready: {:.1f} ms since its fork, {:.1f} of them for its model",
                   rank, record.pid.load(), double(record.start_ns.load()) / 1e6,
                   double(record.model_ns.load()) / 1e6);
  if (answered_) {
    tell_of_ready(rank);
  } else if (wanted_.empty()) {
    answer_host();
  }
  start_next();
}

void Supervisor::tell_of_ready(int rank) {
  const auto& record = session_.record(rank);
  try {
    notices_.push_back(protocol::Joined{rank, record.generation.load(), record.pid.load(),
                                        base::duplicate(runner(rank).pidfd.get())});
  } catch (const SystemError& error) {
    return end_runner(rank, fmt::format("the host cannot be told of runner {}: {}", rank, error.what()));
  }
  send_notices();
}

void Supervisor::answer_host() {
  protocol::Started started;
  started.launcher_pidfd = base::duplicate(launcher_->pidfd());
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    const auto& record = session_.record(rank);
    if (record.life.load() != Life::ready) continue;
    started.runners.push_back(
        {rank, record.generation.load(), record.pid.load(), base::duplicate(runner(rank).pidfd.get())});
  }
  protocol::send_started(host_socket_, started);
  answered_ = true;
}

// ---- The host, and time ----

void Supervisor::host_request() {
  auto request = protocol::next_request(host_socket_);
  if (!request) return;
  base::set_log_step(step_under_way());
  if (std::holds_alternative<protocol::Stop>(*request)) return context_.stop();
  if (const auto* size = std::get_if<protocol::Resize>(&*request)) return resize(size->ranks);
  save_(std::move(std::get<protocol::Save>(*request)));
}

void Supervisor::resize(int ranks) {
  auto& control = session_.control();
  const auto before = control.team.load();
  const auto after = session::all_ranks(ranks);
  try {
    if (control.given_up.load() != 0) throw SessionError(control.given_up_why);
    const auto more = std::max(0, ranks - __builtin_popcount(before));
    session::check_memory(session::session_bytes(session_.header(), ranks),
                          static_cast<std::uint64_t>(config_.memory.limit_bytes),
                          static_cast<std::uint64_t>(more) * session_.header().slab_bytes);
    for (int rank = 0; rank < ranks; ++rank) session_.allocate_slab(rank);
  } catch (const Error& error) {
    return tell_host(protocol::Resized{error.what()});
  }
  control.team.store(after);
  base::log().info("the team has {} runners from the next step on, it had {}", ranks,
                   __builtin_popcount(before));
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    const bool was = (before >> rank & 1) != 0, is = (after >> rank & 1) != 0;
    if (is && !was && has_no_process(rank)) want(rank, 0);  // lost() does for one that is on its way out.
    if (was && !is) {
      std::erase_if(wanted_, [rank](const Wanted& w) { return w.rank == rank; });
      if (!has_no_process(rank)) retire(rank);
    }
  }
  start_next();
  tell_host(protocol::Resized{});
}

bool Supervisor::has_no_process(int rank) const noexcept {
  const auto life = session_.record(rank).life.load();
  return life == Life::absent || life == Life::lost;
}

void Supervisor::retire(int rank) {
  base::log().info("runner {} (pid {}) is let go", rank, session_.record(rank).pid.load());
  session_.record(rank).life.store(Life::retiring);
  runner(rank).retiring = true;
  runner(rank).killed_ns = base::now_ns();
  runner(rank).said_ready.reset();
  runner(rank).lifeline.reset();  // It ends when it sees that.
}

void Supervisor::tick() {
  const auto now = base::now_ns();
  base::set_log_step(step_under_way());
  for (const auto& verdict : watchdog_.look(now)) end_runner(verdict.rank, verdict.why);
  if (const auto slow = source_watch_.look(reading_(), now)) base::log().warn("{}", *slow);
  for (std::size_t i = 0; i < runners_.size(); ++i) {
    const auto& r = runners_[i];
    if (!r.pidfd || r.killed_ns == 0 || ipc::has_ended(r.pidfd.get())) continue;
    const double since_s = double(now - r.killed_ns) / 1e9;
    if (r.retiring && since_s > stop_s) ipc::send_signal(r.pidfd.get(), SIGKILL);
    if (since_s > kill_s)
      give_up(fmt::format("runner {} was killed and does not end: it sits in the kernel ({})", i,
                          ipc::wait_channel(session_.record(static_cast<int>(i)).pid.load())));
  }
  if (answered_ && starting_ && double(now - starting_ns_) / 1e9 > config_.start_timeout)
    end_late_start(*starting_);
  if (!answered_ && start_deadline_.passed() && starting_) {
    const auto* phase = to_string(session_.record(*starting_).phase.load());
    throw RunnerError(fmt::format("runner {} was not ready within start_timeout ({} s); it is in phase {}",
                                  *starting_, config_.start_timeout, phase),
                      *starting_, phase);
  }
  send_notices();
  ticker_.expires_after(std::chrono::nanoseconds(Watchdog::interval_ns));
  ticker_.async_wait([this](const boost::system::error_code& error) {
    if (!error) tick();
  });
}

void Supervisor::end_late_start(int rank) {
  if (runner(rank).pidfd)
    return end_runner(rank, fmt::format("runner {} was not ready within start_timeout ({} s)", rank,
                                        config_.start_timeout));
  base::log().info("the launcher did not start runner {} within start_timeout ({} s); it is ended", rank,
                   config_.start_timeout);
  ipc::send_signal(launcher_->pidfd(), SIGKILL);
}

void Supervisor::tell_host(protocol::Notice notice) {
  auto shared = std::make_shared<protocol::Notice>(std::move(notice));
  boost::asio::post(context_, [this, shared] {
    notices_.push_back(std::move(*shared));
    send_notices();
  });
}

void Supervisor::send_notices() {
  try {
    while (!notices_.empty() && protocol::send_notice(host_socket_, notices_.front())) {
      notices_.pop_front();
      ipc::wake_all(session_.control().life);
    }
  } catch (const SystemError& error) {
    // The host is gone: its socket and its pidfd tell. Anything else passes: tick() tries again.
    if (ipc::peer_is_gone(error)) notices_.clear();
  }
  // A host that reads nothing needs only the last of each rank.
  for (auto n = notices_.begin(); n != notices_.end();) {
    const auto* joined = std::get_if<protocol::Joined>(&*n);
    const bool stale =
        joined != nullptr && joined->generation != session_.record(joined->rank).generation.load();
    n = stale ? notices_.erase(n) : std::next(n);
  }
}

bool Supervisor::host_gone() const noexcept {
  return ipc::is_closed(host_socket_) || ipc::has_ended(host_pidfd_);
}

void Supervisor::stop_runners() {
  base::log().info("the runners are stopped: {}", host_gone() ? "the host is gone" : "the host asked for it");
  session_.control().stopping.store(1);
  session_.wake_everyone();
  const auto deadline = base::Deadline::in_seconds(host_gone() ? host_gone_s : stop_s);
  for (auto& r : runners_) {
    r.said_ready.reset();
    r.end.reset();
    r.lifeline.reset();
    if (r.pidfd) ipc::wait_ended(r.pidfd.get(), deadline);
  }
  launcher_end_.reset();
  launcher_watch_.reset();
  launcher_->stop(base::Deadline::in_seconds(stop_s));
  base::log().info("launcher and runners have ended");
}

}  // namespace accelmgr::manager
