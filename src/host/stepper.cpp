#include "host/stepper.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "accelmgr/errors.hpp"
#include "base/log.hpp"
#include "host/openmp.hpp"
#include "ipc/epoch.hpp"
#include "ipc/process.hpp"
#include "session/attempt.hpp"

namespace accelmgr::host {
namespace {

using session::Life;
using session::Reason;

constexpr std::int64_t wait_slice_ns = 20'000'000;
constexpr double recovery_timeout_s =
    5.0;  // A committed attempt whose slices do not move for so long is finished here.
// Within this the supervisor says how a runner ended: in a millisecond, later on a machine with other work.
constexpr double exit_report_s = 1.0;

double ms(std::uint64_t ns) { return double(ns) / 1e6; }

}  // namespace

Stepper::Stepper(const Config& config, const session::Session& session, const session::Manifest& manifest,
                 Processes& processes)
    : config_(config),
      session_(session),
      reduction_(session, manifest),
      processes_(processes),
      participants_(session::all_ranks(config.nprocs)),
      // Not more spinners than cores: the runners compute meanwhile.
      spin_us_(static_cast<int>(std::thread::hardware_concurrency()) > config.nprocs ? config.runners.spin_us
                                                                                     : 0) {}

StepResult Stepper::step(double timeout_s, bool accumulate, bool parameters_changed) {
  const auto begin = base::now_ns();
  const auto deadline = base::Deadline::in_seconds(timeout_s);
  auto& control = session_.control();
  const auto version = control.parameter_version.load();
  if (version % 2 != 0)
    throw UsageError("step() while parameters are being written; end manager.writing() first");

  StepResult result;
  const auto before = session_.word().attempt;
  Outcome outcome;
  if (!manager_exit_.empty() || processes_.manager_ended()) {
    outcome = manager_lost(before);
  } else if (!settled(before, deadline)) {
    outcome = {StepStatus::timeout,
               fmt::format("runners have not left the step before within {} s: {}", timeout_s, phases()), -1};
  } else if (const int rank = lost_rank(); rank >= 0) {
    outcome = processes_.manager_ended() ? manager_lost(before) : lost(rank);
  } else {
    if (parameters_changed) control.parameter_version.store(version + 2);
    release_idle_threads();
    const auto attempt = session::open_attempt(
        session_, {.participants = participants_,
                   .accumulate = accumulate,
                   .micro_batches = static_cast<std::uint32_t>(config_.grad_accumulation_steps),
                   .batch_size = static_cast<std::uint32_t>(config_.batch_size_per_device),
                   .by_samples = config_.loss_scaling == LossScaling::samples,
                   .mean_buffers = config_.buffers.policy == BufferPolicy::mean,
                   .refuse_nonfinite = config_.on_nonfinite != NonfinitePolicy::keep,
                   .skip = 0,
                   .parameter_version = control.parameter_version.load()});
    if (attempt == 0) throw SessionError("the attempt before this one was never closed");
    result.attempt = attempt;
    outcome = wait(attempt, deadline, timeout_s);
    const auto word = session_.word();
    result.counted = word.attempt == attempt && word.closed && !word.abort;
    aborted_ns_ = word.abort ? base::now_ns() : 0;
  }
  result.status = outcome.status;
  result.error = std::move(outcome.error);
  result.error_type = std::move(outcome.error_type);
  result.rank = outcome.rank;
  fill(result);
  result.step_ms = ms(static_cast<std::uint64_t>(base::now_ns() - begin));
  result.wait_ms = std::max(0.0, result.step_ms - result.compute_ms - result.reduce_ms);
  base::set_log_step(result.step + 1);
  return result;
}

// After an abort, the next attempt opens when all survivors are back in the state of the last commit. Who
// does not come back within `abort_grace` of the abort is ended, however short the deadlines of the steps
// are.
bool Stepper::settled(std::uint64_t attempt, base::Deadline deadline) {
  const auto grace = base::Deadline::at_ns((aborted_ns_ != 0 ? aborted_ns_ : base::now_ns()) +
                                           static_cast<std::int64_t>(config_.abort_grace * 1e9));
  auto& epoch = session_.control().life;
  session::RankMask killed = 0;
  for (;;) {
    const auto seen = ipc::load(epoch);
    bool all = true;
    for (int rank = 0; rank < config_.nprocs; ++rank) {
      const auto& record = session_.record(rank);
      if (record.life.load() == Life::lost || processes_.runner_ended(rank) ||
          record.settled.load() >= attempt)
        continue;
      all = false;
      if (!grace.passed() || (killed >> rank & 1) != 0) continue;
      killed |= session::RankMask{1} << rank;
      base::log().error(
          "runner {} has not left an aborted step within abort_grace ({} s); it is in phase {} and is ended",
          rank, config_.abort_grace, to_string(record.phase.load()));
      processes_.kill_runner(rank);
    }
    if (all) return true;
    if (deadline.passed()) return false;
    ipc::wait_changed(epoch, seen, wait_slice_ns, 0);
  }
}

int Stepper::lost_rank() const noexcept {
  for (int rank = 0; rank < config_.nprocs; ++rank)
    if (session_.record(rank).life.load() == Life::lost || processes_.runner_ended(rank)) return rank;
  return -1;
}

Stepper::Outcome Stepper::lost(int rank) const {
  const auto& record = session_.record(rank);
  const auto patience = base::Deadline::in_seconds(exit_report_s);
  auto& epoch = session_.control().life;
  for (auto seen = ipc::load(epoch); record.life.load() != Life::lost && !patience.passed();
       seen = ipc::load(epoch))
    ipc::wait_changed(epoch, seen, 1'000'000, 0);
  const auto reason = record.reason.load();
  const bool failed = reason == Reason::exception || reason == Reason::model_error;
  const std::string how = record.life.load() == Life::lost ? ipc::describe_exit(record.exit_status.load())
                          : failed                         ? "failed"
                                                           : "has ended";
  return {StepStatus::runner_lost,
          fmt::format("runner {} (pid {}) {} in phase {} of attempt {}{}{}{}", rank, record.pid.load(), how,
                      to_string(record.phase.load()), record.attempt.load(), failed ? ": " : "",
                      failed ? record.error : "",
                      processes_.launcher_ended() ? "; the launcher ended, and all runners with it" : ""),
          rank, reason == Reason::model_error ? "ModelError" : ""};
}

Stepper::Outcome Stepper::wait(std::uint64_t attempt, base::Deadline deadline, double timeout_s) {
  auto& control = session_.control();
  std::int64_t committed_ns = 0;
  for (;;) {
    const auto seen = ipc::load(control.finish);
    const auto word = session_.word();
    if (word.abort) {
      session::close_if_over(session_, attempt);
      return why_aborted(word.mask);
    }
    if (word.closed) return {};
    const bool committed = word.committed(participants_);
    if (committed && committed_ns == 0) committed_ns = base::now_ns();
    if (processes_.manager_ended() ||
        (committed && base::now_ns() - committed_ns > static_cast<std::int64_t>(recovery_timeout_s * 1e9)))
      return manager_lost(attempt);
    if (!committed) {
      if (lost_rank() >= 0) {
        // The manager takes its runners with it: it had ended before, if it did.
        if (processes_.manager_ended()) return manager_lost(attempt);
        session::abort_attempt(session_, attempt, session::author_supervisor);
        continue;
      }
      if (deadline.passed() && session::abort_attempt(session_, attempt, session::author_host)) {
        session::close_if_over(session_, attempt);
        return {StepStatus::timeout, fmt::format("no result within {} s: {}", timeout_s, phases()), -1};
      }
    }
    const auto slice =
        committed ? wait_slice_ns : std::clamp<std::int64_t>(deadline.remaining_ns(), 0, wait_slice_ns);
    ipc::wait_changed(control.finish, seen, slice, spin_us_);
  }
}

Stepper::Outcome Stepper::why_aborted(std::uint32_t author) const {
  if (author == session::author_supervisor) return lost(std::max(0, lost_rank()));
  const int rank = static_cast<int>(author);
  const auto& record = session_.record(rank);
  switch (record.reason.load()) {
    case Reason::data_end:
      return {StepStatus::data_end, record.error, rank};
    case Reason::data_error:
      return {StepStatus::data_end, fmt::format("the data source failed: {}", record.error), rank,
              "DataError"};
    case Reason::nonfinite:
      return {StepStatus::nonfinite, fmt::format("rank {}: {}", rank, record.error), rank};
    case Reason::parameters_changed:
      throw UsageError(fmt::format("rank {}: {}; write parameters between steps", rank, record.error));
    default:
      return lost(rank);
  }
}

// Nobody else is left to finish a committed attempt, or what is left does not move: end it, then finish here.
Stepper::Outcome Stepper::manager_lost(std::uint64_t attempt) {
  if (manager_exit_.empty()) {
    processes_.kill();
    manager_exit_ = processes_.end();
  }
  session::abort_attempt(session_, attempt, session::author_host);
  if (session_.word().committed(participants_)) {
    for (int rank = 0; rank < config_.nprocs; ++rank) reduction_.finish_slice(rank, attempt);
  }
  session::close_if_over(session_, attempt);
  return {StepStatus::manager_lost, "the manager process is gone: " + manager_exit_, -1};
}

std::string Stepper::phases() const {
  std::string text;
  for (int rank = 0; rank < config_.nprocs; ++rank)
    text += fmt::format("{}rank {} in phase {}", rank == 0 ? "" : ", ", rank,
                        to_string(session_.record(rank).phase.load()));
  return text;
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
  std::uint64_t compute_ns = 0, reduce_ns = 0;
  for (int rank = 0; rank < config_.nprocs; ++rank) {
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
