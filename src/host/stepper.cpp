#include "host/stepper.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>

#include "accelmgr/errors.hpp"
#include "base/log.hpp"
#include "host/openmp.hpp"
#include "host/standstill.hpp"
#include "ipc/epoch.hpp"
#include "ipc/process.hpp"
#include "session/attempt.hpp"

namespace accelmgr::host {
namespace {

using session::Life;
using session::Reason;

constexpr std::int64_t wait_slice_ns = 20'000'000;
// A committed attempt whose slices do not move for so long is finished here: more than the supervisor, who
// ends stuck runners before, takes for it.
constexpr double recovery_timeout_s = 5.0;
constexpr std::uint64_t most_causes = 3;

double ms(std::uint64_t ns) { return double(ns) / 1e6; }

std::vector<std::string> lines_of(const char* log) {
  std::vector<std::string> lines;
  std::istringstream text(log);
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

std::string who(const FailureCause& cause) {
  return cause.rank < 0 ? std::string("the launcher") : fmt::format("runner {}", cause.rank);
}

/// "runner 1 (pid 7) killed by signal 9 (KILL) in phase forward of attempt 2: what() said". `again`: the one
/// before said just that.
std::string one_line(const FailureCause& cause, bool again) {
  return fmt::format(
      "{} (pid {}) {}{}{}{}", who(cause), cause.pid, cause.exit,
      cause.rank < 0 ? "" : fmt::format(" in phase {} of attempt {}", cause.phase, cause.attempt),
      cause.what.empty() ? "" : ": ", again && !cause.what.empty() ? "the same again" : cause.what);
}

}  // namespace

Stepper::Stepper(const Config& config, const session::Session& session, const session::Manifest& manifest,
                 Processes& processes)
    : config_(config), session_(session), reduction_(session, manifest), processes_(processes) {}

StepResult Stepper::step(const StepOptions& options, double timeout_s) {
  const auto begin = base::now_ns();
  const Patience patience{base::Deadline::in_seconds(timeout_s), timeout_s, options.interrupted};
  auto& version = session_.control().parameter_version;
  if (version.load() % 2 != 0)
    throw UsageError("step() while parameters are being written; end manager.writing() first");
  if (options.parameters_changed) version.store(version.load() + 2);

  StepResult result;
  auto purpose = Purpose::compute;
  Outcome outcome;
  for (;;) {
    outcome = assemble(patience);
    if (outcome.status != StepStatus::ok) break;
    outcome = attempt(purpose, options.accumulate, patience, result);
    if (outcome.status == StepStatus::runner_lost) continue;  // The supervisor repairs it, or gives up.
    if (outcome.status == StepStatus::ok && purpose == Purpose::skip) {
      purpose = Purpose::compute;
      ++result.skipped;
      continue;
    }
    if (outcome.status == StepStatus::nonfinite && config_.on_nonfinite == NonfinitePolicy::skip_batch &&
        nonfinite_in_a_row_ < config_.nonfinite_limit) {
      ++nonfinite_in_a_row_;
      base::log().warn("{}; its batches are left out ({} in a row)", outcome.error, nonfinite_in_a_row_);
      purpose = Purpose::skip;
      continue;
    }
    break;
  }
  if (patience.thrown) std::rethrow_exception(patience.thrown);
  result.status = outcome.status;
  result.error = std::move(outcome.error);
  result.error_type = std::move(outcome.error_type);
  result.rank = outcome.rank;
  if (result.status == StepStatus::runner_lost) result.causes = causes();
  if (result.status == StepStatus::manager_lost) result.causes = {*manager_loss_};
  fill(result);
  if (result.counted) nonfinite_in_a_row_ = result.nonfinite ? nonfinite_in_a_row_ + 1 : 0;
  result.step_ms = ms(static_cast<std::uint64_t>(base::now_ns() - begin));
  result.wait_ms = std::max(0.0, result.step_ms - result.compute_ms - result.reduce_ms);
  base::log().debug("{}: loss {}, {} samples, {} attempts, {:.3f} ms", to_string(result.status), result.loss,
                    result.samples, result.tries, result.step_ms);
  base::set_log_step(result.step + 1);
  return result;
}

bool Stepper::Patience::over() const {
  if (deadline.passed() || thrown) return true;
  try {
    return interrupted && interrupted();
  } catch (...) {
    thrown = std::current_exception();
    return true;
  }
}

std::string Stepper::Patience::bound() const {
  return deadline.passed() ? fmt::format("within {} s", timeout_s) : "before it was interrupted";
}

// An attempt opens when the team is complete: every rank ready, its pidfd in our hands, its working state
// that of the last commit; and the elements are dealt to just these ranks. Until then it is the supervisor's
// turn.
Stepper::Outcome Stepper::assemble(const Patience& patience) {
  auto& control = session_.control();
  for (;;) {
    const auto seen = ipc::load(control.life);
    if (manager_loss_ || processes_.manager_ended()) return manager_lost(session_.word().attempt);
    const auto team = control.team.load();
    if (control.given_up.load() != 0) return lost();
    // What the loader was asked for it deals whenever it comes back from the source: until then nobody may
    // read, and nothing else be asked for.
    const auto asked = control.deal_to.load();
    if (team_ready(team) && dealt_to(asked)) {
      if (asked == team) {
        participants_ = team;
        return {};
      }
      control.deal_to.store(team);
      ipc::wake_all(control.finish);
    }
    if (patience.over())
      return {StepStatus::timeout,
              fmt::format("no attempt could begin {}: {}{}{}{}", patience.bound(), phases(team),
                          dealt_to(control.deal_to.load())
                              ? ""
                              : "; elements cannot be dealt while the data source reads",
                          processes_.unread().empty() ? "" : "; ", processes_.unread())};
    ipc::wait_changed(control.life, seen,
                      std::clamp<std::int64_t>(patience.deadline.remaining_ns(), 0, wait_slice_ns), 0);
  }
}

bool Stepper::team_ready(session::RankMask team) {
  const auto word = session_.word();
  if (!word.closed) return false;
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    if ((team >> rank & 1) == 0) continue;
    const auto& record = session_.record(rank);
    if (record.life.load() != Life::ready || record.settled.load() < word.attempt) return false;
    const auto generation = record.generation.load();
    if (!processes_.holds(rank, generation)) processes_.take_notices();
    if (!processes_.holds(rank, generation) || processes_.runner_ended(rank)) return false;
  }
  return true;
}

bool Stepper::dealt_to(session::RankMask team) const noexcept {
  return session_.dealing().dealt_to.load(std::memory_order_acquire) == team;
}

Stepper::Outcome Stepper::attempt(Purpose purpose, bool accumulate, const Patience& patience,
                                  StepResult& result) {
  auto& control = session_.control();
  const bool skip = purpose == Purpose::skip;
  const bool keep =
      config_.on_nonfinite == NonfinitePolicy::keep && nonfinite_in_a_row_ < config_.nonfinite_limit;
  release_idle_threads();
  const auto attempt = session::open_attempt(
      session_, {.participants = participants_,
                 .accumulate = accumulate,
                 .micro_batches = static_cast<std::uint32_t>(config_.grad_accumulation_steps),
                 .batch_size = static_cast<std::uint32_t>(config_.batch_size_per_device),
                 .by_samples = config_.loss_scaling == LossScaling::samples,
                 .mean_buffers = config_.buffers.policy == BufferPolicy::mean,
                 .refuse_nonfinite = !keep,
                 .skip = skip,
                 .parameter_version = control.parameter_version.load()});
  if (attempt == 0) throw SessionError("the attempt before this one was never closed");
  base::log().debug("attempt {} is open for the ranks of mask {:#x}", attempt, participants_);
  result.attempt = attempt;
  result.tries += skip ? 0 : 1;
  auto outcome = wait(attempt, patience);
  const auto word = session_.word();
  result.counted = !skip && word.attempt == attempt && word.closed && !word.abort;
  if (outcome.status != StepStatus::ok)
    base::log().info("attempt {} ended without a result: {}{}{}", attempt, to_string(outcome.status),
                     outcome.error.empty() ? "" : ": ", outcome.error);
  return outcome;
}

int Stepper::lost_rank() const noexcept {
  for (int rank = 0; rank < session_.ranks(); ++rank)
    if ((participants_ >> rank & 1) != 0 && processes_.runner_ended(rank)) return rank;
  return -1;
}

Stepper::Outcome Stepper::wait(std::uint64_t attempt, const Patience& patience) {
  auto& control = session_.control();
  // Not more spinners than cores: the runners compute meanwhile.
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const int spin_us = cores > __builtin_popcount(participants_) ? config_.runners.spin_us : 0;
  Standstill standstill;
  Standings standings{};
  bool waited = false;
  for (;;) {
    const auto seen = ipc::load(control.finish);
    const auto word = session_.word();
    if (word.abort) {
      session::close_if_over(session_, attempt);
      return why_aborted(word.mask);
    }
    if (word.closed) return {};
    const bool committed = word.committed(participants_);
    // Who finished its slice last was to close the attempt, but may have been stopped just before that.
    if (committed && session::close_if_over(session_, attempt)) continue;
    std::int64_t stood_ns = 0;
    if (committed) {
      std::uint64_t cursors = 0;
      for (int rank = 0; rank < session_.ranks(); ++rank) cursors += session_.record(rank).cursor.load();
      stood_ns = standstill.look(cursors, base::now_ns());
    }
    if (processes_.manager_ended() || stood_ns > static_cast<std::int64_t>(recovery_timeout_s * 1e9))
      return manager_lost(attempt);
    if (!committed) {
      if (lost_rank() >= 0) {
        // The manager takes its runners with it: it had ended before, if it did.
        if (processes_.manager_ended()) return manager_lost(attempt);
        session::abort_attempt(session_, attempt, session::author_supervisor);
        continue;
      }
      if (waited) look(standings);  // A step that is done at once is not held up for it.
      if (patience.over()) {
        // Told before they are: they leave the attempt at once.
        auto text = fmt::format("no result {}: {}", patience.bound(), phases(participants_, &standings));
        if (session::abort_attempt(session_, attempt, session::author_host)) {
          session::close_if_over(session_, attempt);
          return {StepStatus::timeout, std::move(text), -1};
        }
      }
    }
    const auto slice = committed
                           ? wait_slice_ns
                           : std::clamp<std::int64_t>(patience.deadline.remaining_ns(), 0, wait_slice_ns);
    ipc::wait_changed(control.finish, seen, slice, spin_us);
    waited = true;
  }
}

Stepper::Outcome Stepper::why_aborted(std::uint32_t author) const {
  if (author == session::author_supervisor) return {StepStatus::runner_lost};
  const int rank = static_cast<int>(author);
  const auto& record = session_.record(rank);
  switch (record.reason.load()) {
    case Reason::data_end:
      return {StepStatus::data_end, record.error, rank};
    case Reason::data_error:
      return {StepStatus::data_end,
              fmt::format("the data source '{}' failed: {}", config_.data.kind, record.error), rank,
              "DataError"};
    case Reason::nonfinite:
      return {StepStatus::nonfinite, fmt::format("rank {}: {}", rank, record.error), rank};
    case Reason::parameters_changed:
      throw UsageError(fmt::format("rank {}: {}; write parameters between steps", rank, record.error));
    default:
      return {StepStatus::runner_lost};
  }
}

// What the supervisor found and has given up on.
Stepper::Outcome Stepper::lost() const {
  const auto found = causes();
  const auto& control = session_.control();
  Outcome outcome{StepStatus::runner_lost};
  if (config_.runners.on_loss != LossPolicy::fail) outcome.error = fmt::format("{}: ", control.given_up_why);
  for (std::size_t i = 0; i < found.size(); ++i) {
    const bool again = i > 0 && found[i].what == found[i - 1].what;
    outcome.error += fmt::format("{}{}", i == 0 ? "" : "; then ", one_line(found[i], again));
  }
  if (found.empty()) return outcome;
  outcome.rank = found.back().rank;
  const auto& last = session_.incident(control.incidents.load());
  if (last.reason == Reason::model_error) outcome.error_type = "ModelError";
  return outcome;
}

std::vector<FailureCause> Stepper::causes() const {
  std::vector<FailureCause> found;
  const auto last = session_.control().incidents.load();
  for (auto number = last > most_causes ? last - most_causes + 1 : 1; number <= last; ++number) {
    const auto& incident = session_.incident(number);
    found.push_back({.time_s = double(incident.time_ns) / 1e9,
                     .rank = incident.rank,
                     .pid = incident.pid,
                     .phase = incident.rank < 0 ? "" : to_string(incident.phase),
                     .step = incident.step,
                     .attempt = incident.attempt,
                     .exit = ipc::describe_exit(incident.exit_status),
                     .what = incident.what,
                     .log = lines_of(incident.log)});
  }
  return found;
}

// Nobody else is left to finish a committed attempt, or what is left does not move: end it, then finish here.
Stepper::Outcome Stepper::manager_lost(std::uint64_t attempt) {
  if (!manager_loss_) {
    const auto time_s =
        double(std::chrono::system_clock::now().time_since_epoch() / std::chrono::milliseconds(1)) / 1e3;
    const int pid = processes_.manager_pid();
    processes_.kill();
    auto& loss = manager_loss_.emplace();
    loss.time_s = time_s;
    loss.pid = pid;
    loss.step = session_.counters(session_.word().index).steps + 1;
    loss.attempt = attempt;
    loss.exit = processes_.end();
    loss.what = "the manager process is gone";
    base::log().info("the manager (pid {}) is lost: {}", pid, loss.exit);
  }
  const auto participants = session_.control().request.participants;
  session::abort_attempt(session_, attempt, session::author_host);
  if (session_.word().committed(participants)) {
    for (int rank = 0; rank < session_.ranks(); ++rank)
      if ((participants >> rank & 1) != 0) reduction_.finish_slice(rank, attempt);
  }
  session::close_if_over(session_, attempt);
  return {StepStatus::manager_lost, "the manager process is gone: " + manager_loss_->exit, -1};
}

bool Stepper::manager_is_lost() {
  if (!manager_loss_ && processes_.manager_ended()) manager_lost(session_.word().attempt);
  return manager_loss_.has_value();
}

void Stepper::look(Standings& standings) const noexcept {
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    auto& standing = standings[static_cast<std::size_t>(rank)];
    const auto phase = session_.record(rank).phase.load();
    if (standing.since_ns != 0 && phase == standing.phase) continue;
    standing = {phase, base::now_ns()};
  }
}

/// "rank 0 in phase forward for 1.9 s, rank 1 in phase data for 2.0 s (the data source 'text' has given ...)"
std::string Stepper::phases(session::RankMask ranks, const Standings* standings) const {
  std::string text;
  bool wait_for_data = false;
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    if ((ranks >> rank & 1) == 0) continue;
    const auto& record = session_.record(rank);
    const auto life = record.life.load();
    const auto phase = record.phase.load();
    text += fmt::format("{}rank {} {}", text.empty() ? "" : ", ", rank,
                        life == Life::lost || life == Life::retiring ? std::string("is being replaced")
                        : life == Life::absent                       ? std::string("is yet to be started")
                                               : fmt::format("in phase {}", to_string(phase)));
    if (standings == nullptr || life != Life::ready) continue;
    const auto since_ns = (*standings)[static_cast<std::size_t>(rank)].since_ns;
    if (since_ns != 0) text += fmt::format(" for {:.1f} s", double(base::now_ns() - since_ns) / 1e9);
    wait_for_data = wait_for_data || phase == session::Phase::data;
  }
  if (wait_for_data)
    text += fmt::format(" (the data source '{}' has given {} elements so far, and is waited for)",
                        config_.data.kind, elements_dealt());
  return text;
}

/// All that the source has given, over all restarts, that was dealt.
std::uint64_t Stepper::elements_dealt() const noexcept {
  const auto& dealing = session_.dealing();
  auto elements = dealing.first_element;
  const auto team = dealing.dealt_to.load(std::memory_order_acquire);
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    if ((team >> rank & 1) == 0) continue;
    const auto& queue = session_.queue(rank);
    elements += (queue.published.load() - dealing.first_batch[rank]) *
                    static_cast<std::uint64_t>(config_.batch_size_per_device) +
                queue.filling.load();
  }
  return elements;
}

void Stepper::fill(StepResult& result) const {
  const auto& request = session_.control().request;
  result.step = session_.counters(session_.word().index).steps;
  result.parameter_version = session_.control().parameter_version.load();
  if (!result.counted) return;
  const auto total = session::tally(session_, request);
  const double scale = session::mean_scale(request, total);
  result.loss = total.loss * scale;
  result.samples = total.samples;
  result.nonfinite = total.nonfinite;
  result.participants = static_cast<std::uint32_t>(__builtin_popcount(request.participants));
  std::uint64_t compute_ns = 0, reduce_ns = 0;
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    if ((request.participants >> rank & 1) == 0) continue;
    const auto& record = session_.record(rank);
    compute_ns = std::max(compute_ns, record.ballot.compute_ns);
    reduce_ns = std::max(reduce_ns, record.reduce_ns.load());
    for (std::uint32_t i = 0; i < record.ballot.scalars; ++i) {
      const auto& scalar = record.ballot.scalar[i];
      auto found = std::find_if(result.scalars.begin(), result.scalars.end(),
                                [&](const auto& s) { return s.first == scalar.name; });
      if (found == result.scalars.end()) found = result.scalars.insert(found, {scalar.name, 0.0});
      found->second += scalar.sum * scale;
    }
  }
  result.compute_ms = ms(compute_ns);
  result.reduce_ms = ms(reduce_ns);
}

}  // namespace accelmgr::host
