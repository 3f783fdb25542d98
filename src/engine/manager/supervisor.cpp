#include "engine/manager/supervisor.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "base/utf8.hpp"
#include "engine/runner/process.hpp"
#include "engine/runner/rank_setup.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/stored_text.hpp"

namespace accelmgr::manager {
namespace {

using session::RunnerState;

}  // namespace

Supervisor::Supervisor(boost::asio::io_context& loop, const Config& config,
                       const session::SupervisorView& view, const session::Manifest& manifest,
                       ipc::ForkServerClient fork_server, MakeForkServer relaunch, Reading reading,
                       Clock clock)
    : loop_(loop),
      config_(config),
      view_(view),
      session_(view.session()),
      manifest_(manifest),
      spans_(view.spans()),
      reduction_(view, manifest),
      update_(view, manifest),
      fork_server_(std::move(fork_server)),
      relaunch_(std::move(relaunch)),
      clock_(std::move(clock)),
      ticker_(loop),
      runners_(static_cast<std::size_t>(session_.ranks())),
      lost_ns_(static_cast<std::size_t>(session_.ranks())),
      start_deadline_ns_(clock_() + static_cast<std::int64_t>(config.start_timeout * 1e9)),
      policy_(config.runners),
      watchdog_(config, session_),
      reading_(std::move(reading)),
      source_watch_(session_, config.data.kind),
      oom_kills_seen_(ipc::oom_kills().count) {}

void Supervisor::start(std::function<void()> ready, std::function<void()> gave_up, StartOrder order) {
  ready_ = std::move(ready);
  gave_up_ = std::move(gave_up);
  order_ = order;
  const auto team = session_.control().team.load();
  for (int rank = 0; rank < session_.ranks(); ++rank)
    if ((team >> rank & 1) != 0) want(rank, 0);
  watch_processes();
  tick();
  start_next();
}

std::uint64_t Supervisor::step_under_way() const noexcept {
  return session_.counters(session_.word().index).steps + 1;
}

void Supervisor::watch_processes() {
  processes_watch_ = std::make_unique<Watch>(loop_, fork_server_->descriptor(), [this] {
    look_at_processes();
    return true;
  });
}

// ---- Starting ----

void Supervisor::want(int rank, std::int64_t delay_ns) {
  const Wanted wanted{rank, clock_() + delay_ns};
  const auto is_before = [](const Wanted& a, const Wanted& b) { return a.not_before_ns < b.not_before_ns; };
  wanted_.insert(std::ranges::upper_bound(wanted_, wanted, is_before), wanted);
}

// One at a time builds, unless there is nothing to be built. The first team does so in the order of its
// ranks; later nobody waits for a rank that opens its device. A later look() starts those whose time has not
// come.
void Supervisor::start_next() {
  if (fork_server_lost_ || session_.control().given_up.load() != 0) return;
  open_devices();
  const bool one_builds =
      std::ranges::any_of(runners_, [](const Runner& r) { return r.part == StartPart::building; });
  if (one_builds && (order_ == StartOrder::by_rank || has_started_)) return;
  const auto next = std::ranges::find_if(wanted_, [this](const Wanted& wanted) {
    return !has_started_ || runner(wanted.rank).part != StartPart::opening;
  });
  if (next == wanted_.end() || next->not_before_ns > clock_()) return;
  const int rank = next->rank;
  if (runner(rank).part == StartPart::opening) return;
  wanted_.erase(next);
  if (runner(rank).part == StartPart::waiting)
    give_turn(rank);
  else
    start_runner(rank, StartPart::building);
  if (order_ == StartOrder::at_once && !has_started_) start_next();
}

void Supervisor::open_devices() {
  const auto now = clock_();
  std::vector<int> ranks;  // A start that fails changes `wanted_`.
  for (const auto& [rank, not_before_ns] : wanted_)
    if (not_before_ns <= now && runner(rank).part == StartPart::none && has_device(rank))
      ranks.push_back(rank);
  for (const int rank : ranks) start_runner(rank, StartPart::opening);
}

bool Supervisor::has_device(int rank) const {
  return runner::config_of_rank(config_, rank).runners.device == Device::cuda;
}

void Supervisor::start_runner(int rank, StartPart part) {
  runner(rank) = {};
  runner(rank).asked_ns = clock_();
  begin_part(rank, part);
  view_.clear_record(rank);
  view_.record(rank).state.store(RunnerState::starting);
  try {
    spawn(rank);
  } catch (const SystemError& error) {
    if (!ipc::peer_is_gone(error)) return not_started(rank, error.what());
    // The fork server is gone. Its pidfd reports that, and the next one starts all.
    runner(rank).part = StartPart::none;
  } catch (const SessionError& error) {
    not_started(rank, error.what());
  }
}

void Supervisor::spawn(int rank) {
  auto [ours, theirs] = ipc::socket_pair();
  runner(rank).lifeline = std::move(ours);
  runner(rank).says =
      std::make_unique<Watch>(loop_, runner(rank).lifeline.get(), [this, rank] { return hear(rank); });
  auto fds = session_.fds();
  fds.push_back(theirs.get());
  fork_server_->spawn(rank, session_.record(rank).generation.load() + 1, fds);
}

/// Returns whether the runner will say more.
bool Supervisor::hear(int rank) {
  const int lifeline = runner(rank).lifeline.get();
  // A runner that has ended is reported by its pidfd, and the loss of the fork server ends every start.
  if (ipc::is_closed(lifeline) || runner(rank).part == StartPart::none) return false;
  std::optional<ipc::Message> message;
  try {
    message = ipc::receive_what_fits(lifeline, base::Deadline::at_ns(0));
  } catch (const Error& error) {
    end_runner(rank, fmt::format("runner {} is not understood: {}", rank, error.what()));
    return false;
  }
  if (!message) return false;
  if (message->bytes == runner::said_opened) {
    begin_part(rank, StartPart::waiting);
  } else if (message->bytes == runner::said_built) {
    begin_part(rank, StartPart::built);
  } else if (message->bytes == runner::said_ready) {
    runner(rank).is_ready = true;
    look_at_processes();  // The fork server reported the fork before, but that may not be read yet.
    ready_if_known(rank);
    return false;
  } else {
    constexpr std::size_t shown_bytes = 100;
    end_runner(rank,
               fmt::format("runner {} is not understood: it said '{}' ({} bytes) while it started", rank,
                           base::valid_utf8(message->bytes.substr(0, shown_bytes)), message->bytes.size()));
    return false;
  }
  start_next();
  return true;
}

void Supervisor::give_turn(int rank) {
  begin_part(rank, StartPart::building);
  try {
    ipc::send(runner(rank).lifeline.get(), runner::told_to_build);
  } catch (const Error& error) {
    // Its pidfd reports that it has ended; otherwise it is ended at start_timeout.
    base::log().info("runner {} cannot be told to build its replica: {}", rank, error.what());
  }
}

void Supervisor::begin_part(int rank, StartPart part) {
  runner(rank).spent_ns = start_took_ns(rank);
  runner(rank).part_ns = clock_();
  runner(rank).part = part;
}

/// Without the wait for its turn.
std::int64_t Supervisor::start_took_ns(int rank) const {
  const auto& r = runner(rank);
  const bool counts = r.part != StartPart::none && r.part != StartPart::waiting;
  return r.spent_ns + (counts ? clock_() - r.part_ns : 0);
}

/// "init", or what a runner with a GPU does there.
std::string Supervisor::phase_of_start(int rank) const {
  const auto part = runner(rank).part;
  return fmt::format("{}{}", to_string(session_.record(rank).phase.load()),
                     part == StartPart::opening   ? " (opening its device)"
                     : part == StartPart::waiting ? " (waiting to build)"
                     : part == StartPart::built   ? " (its replica is built)"
                                                  : "");
}

// No process exists. To the policy this is a runner that was lost while it started.
void Supervisor::not_started(int rank, const std::string& why) {
  runner(rank).verdict = fmt::format("it could not be started: {}", why);
  lost(rank, W_EXITCODE(ipc::exit_not_forked, 0));
}

void Supervisor::look_at_processes() {
  while (auto event = fork_server_->take(clock_())) std::visit([this](auto& one) { take(one); }, *event);
  if (!fork_server_->server_exit()) return;
  if (!fork_server_lost_) note_fork_server_loss();
  if (!fork_server_->has_children() && session_.control().given_up.load() == 0) relaunch();
}

void Supervisor::take(ipc::Started& started) {
  const int rank = started.rank;
  auto& record = view_.record(rank);
  record.generation.store(started.generation);
  record.pid.store(started.pid);
  runner(rank).pidfd = std::move(started.pidfd);
  base::log().info("runner {} (pid {}) was forked by the fork server (pid {})", rank, started.pid,
                   fork_server_->pid());
  // It was to be ended before its pidfd was here.
  if (!runner(rank).verdict.empty()) ipc::send_signal(runner(rank).pidfd.get(), SIGKILL);
  ready_if_known(rank);
}

void Supervisor::take(const ipc::Ended& ended) {
  if (ended.with_server) {
    if (!fork_server_lost_) note_fork_server_loss();
    note_end(ended.rank, ended.wait_status);
  } else if (ended.pid == 0) {
    not_started(ended.rank, SystemError("forking it", ended.error).what());
  } else {
    lost(ended.rank, ended.wait_status);
  }
}

// A runner is ready when it has said so and the fork server has sent its pidfd.
void Supervisor::ready_if_known(int rank) {
  if (runner(rank).part == StartPart::none || !runner(rank).is_ready || !runner(rank).pidfd) return;
  runner(rank).part = StartPart::none;
  record_start(rank);
  view_.record(rank).state.store(RunnerState::ready);
  view_.announce_readiness();
  const auto& record = session_.record(rank);
  base::log().info("runner {} (pid {}) is ready: {:.1f} ms since its fork, {:.1f} of them for its model",
                   rank, record.pid.load(), double(record.start_ns.load()) / 1e6,
                   double(record.model_ns.load()) / 1e6);
  if (has_started_) {
    tell_of_ready(rank);
  } else if (wanted_.empty() &&
             std::ranges::all_of(runners_, [](const Runner& r) { return r.part == StartPart::none; })) {
    has_started_ = true;
    ready_();
  }
  start_next();
}

void Supervisor::record_start(int rank) {
  const auto now = clock_();
  const auto record = [&](session::Activity activity, std::int64_t begin_ns) {
    spans_.record({.begin_ns = begin_ns,
                   .end_ns = now,
                   .step = step_under_way(),
                   .attempt = 0,
                   .pid = 0,
                   .rank = static_cast<std::int16_t>(rank),
                   .activity = activity});
  };
  record(session::Activity::start_runner, runner(rank).asked_ns);
  auto& lost_ns = lost_ns_[static_cast<std::size_t>(rank)];
  if (lost_ns != 0) record(session::Activity::recover, std::exchange(lost_ns, 0));
}

void Supervisor::tell_of_ready(int rank) {
  const auto& record = session_.record(rank);
  try {
    for (auto* driver : drivers_)
      driver->tell(protocol::Joined{rank, record.generation.load(), record.pid.load(),
                                    base::duplicate(runner(rank).pidfd.get())});
  } catch (const SystemError& error) {
    return end_runner(rank,
                      fmt::format("the host cannot be told that runner {} is ready: {}", rank, error.what()));
  }
  send_notices();
}

protocol::Started Supervisor::started() const {
  protocol::Started started;
  started.fork_server_pidfd = base::duplicate(fork_server_->pidfd());
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    const auto& record = session_.record(rank);
    if (record.state.load() != RunnerState::ready) continue;
    started.runners.push_back(
        {rank, record.generation.load(), record.pid.load(), base::duplicate(runner(rank).pidfd.get())});
  }
  return started;
}

// ---- The team, and time ----

protocol::Resized Supervisor::resize(int ranks) {
  const auto& control = session_.control();
  const auto before = control.team.load();
  const auto after = session::all_ranks(ranks);
  try {
    if (control.given_up.load() != 0) throw SessionError(session::text_of(control.given_up_why));
    if (ranks > session_.ranks())
      throw SessionError(fmt::format("the session has room for {} runners, not {}", session_.ranks(), ranks));
    const auto more = std::max(0, ranks - __builtin_popcount(before));
    session::check_memory(session_.used_bytes(ranks), static_cast<std::uint64_t>(config_.memory.limit_bytes),
                          static_cast<std::uint64_t>(more) * session_.slab_bytes());
    for (int rank = 0; rank < ranks; ++rank) {
      session_.allocate_slab(rank);
      session::allocate_unfrozen(session_, manifest_, rank);
    }
  } catch (const Error& error) {
    return {error.what()};
  }
  view_.control().team.store(after);
  base::log().info("the team has {} runners from the next step on; it had {}", ranks,
                   __builtin_popcount(before));
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    const bool was = (before >> rank & 1) != 0, is = (after >> rank & 1) != 0;
    if (is && !was && has_no_process(rank)) want(rank, 0);  // If it is still retiring, note_end() does.
    if (was && !is) {
      std::erase_if(wanted_, [rank](const Wanted& w) { return w.rank == rank; });
      if (!has_no_process(rank)) retire(rank, "a resize removes it");
    }
  }
  start_next();
  return {};
}

bool Supervisor::has_no_process(int rank) const noexcept {
  const auto state = session_.record(rank).state.load();
  return state == RunnerState::absent || state == RunnerState::lost;
}

// A replacement that starts does not take part yet.
bool Supervisor::participant_is_gone(int rank) const noexcept {
  return has_no_process(rank) || session_.record(rank).state.load() == RunnerState::starting;
}

void Supervisor::replace(int rank) {
  const auto refuse = [rank](const std::string& why) {
    throw SessionError(fmt::format("runner {} cannot be replaced now: {}", rank, why));
  };
  if (session_.control().given_up.load() != 0) refuse(session::text_of(session_.control().given_up_why));
  if ((session_.control().team.load() >> rank & 1) == 0) refuse("it is not in the team");
  if (fork_server_lost_ || session_.record(rank).state.load() != RunnerState::ready)
    refuse("it is being replaced already");
  view_.control().replacements.fetch_add(1);
  retire(rank, "it is to be replaced");
}

// If the rank is in the team, another runner takes its place when this one has ended: see note_end().
void Supervisor::retire(int rank, const char* why) {
  base::log().info("runner {} (pid {}) is asked to end: {}", rank, session_.record(rank).pid.load(), why);
  view_.record(rank).state.store(RunnerState::retiring);
  runner(rank).retiring = true;
  runner(rank).killed_ns = clock_();
  runner(rank).says.reset();
  runner(rank).lifeline.reset();  // The runner ends when it sees that.
}

void Supervisor::tick() {
  look();
  ticker_.expires_after(std::chrono::nanoseconds(timing::supervisor_look_ns));
  ticker_.async_wait([this](const boost::system::error_code& error) {
    if (!error) tick();
  });
}

void Supervisor::look() {
  const auto now = clock_();
  base::set_log_step(step_under_way());
  look_at_processes();
  finish_updates();
  for (const auto& verdict : watchdog_.look(now)) end_runner(verdict.rank, verdict.why);
  if (const auto slow = source_watch_.look(reading_(), now)) base::log().warn("{}", *slow);
  end_stuck(now);
  end_late_starts(now);
  send_notices();
  start_next();
}

void Supervisor::send_notices() {
  for (auto* driver : drivers_) driver->send_notices();
}

/// Kills retired runners that have not ended in time; gives up if a killed one has not.
void Supervisor::end_stuck(std::int64_t now_ns) {
  for (std::size_t i = 0; i < runners_.size(); ++i) {
    const auto& r = runners_[i];
    if (!r.pidfd || r.killed_ns == 0 || ipc::has_ended(r.pidfd.get())) continue;
    const double since_s = timing::seconds(now_ns - r.killed_ns);
    if (r.retiring && since_s > timing::runners_stop_s) ipc::send_signal(r.pidfd.get(), SIGKILL);
    if (since_s > timing::sits_in_kernel_s)
      give_up(fmt::format("runner {} was killed but has not ended: it is blocked in the kernel ({})", i,
                          ipc::wait_channel(session_.record(static_cast<int>(i)).pid.load())));
  }
}

// The runners of the first team share one start_timeout, because the host waits for all of them. A runner
// that is started later has start_timeout for its own work: the wait for its turn to build does not count.
void Supervisor::end_late_starts(std::int64_t now_ns) {
  std::optional<int> slowest;
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    if (runner(rank).part == StartPart::none || runner(rank).part == StartPart::waiting) continue;
    if (!slowest || start_took_ns(rank) > start_took_ns(*slowest)) slowest = rank;
    if (has_started_ && timing::seconds(start_took_ns(rank)) > config_.start_timeout) end_late_start(rank);
  }
  if (has_started_ || now_ns < start_deadline_ns_ || !slowest) return;
  throw RunnerError(lateness(*slowest), *slowest, to_string(session_.record(*slowest).phase.load()));
}

std::string Supervisor::lateness(int rank) const {
  return fmt::format("runner {} was not ready within start_timeout ({} s); it is in phase {}", rank,
                     config_.start_timeout, phase_of_start(rank));
}

void Supervisor::end_late_start(int rank) {
  if (runner(rank).pidfd) return end_runner(rank, lateness(rank));
  base::log().info(
      "the fork server did not start runner {} within start_timeout ({} s); the fork server is killed", rank,
      config_.start_timeout);
  ipc::send_signal(fork_server_->pidfd(), SIGKILL);
}

void Supervisor::stop_runners(double patience_s) {
  view_.stop();
  view_.wake_everyone();
  const auto deadline = base::Deadline::in_seconds(patience_s);
  for (auto& r : runners_) {
    r.says.reset();
    r.lifeline.reset();
    if (r.pidfd) ipc::wait_ended(r.pidfd.get(), deadline);
  }
  processes_watch_.reset();
  fork_server_->stop(base::Deadline::in_seconds(timing::runners_stop_s));
  base::log().info("fork server and runners have ended");
}

void Supervisor::end_runners() noexcept {
  fork_server_->stop(base::Deadline::in_seconds(timing::runners_stop_s));  // Ends all runners too.
}

}  // namespace accelmgr::manager
