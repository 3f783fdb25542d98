#include "engine/client/stepper.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "accelmgr/errors.hpp"
#include "base/ipc/cores.hpp"
#include "base/ipc/epoch.hpp"
#include "base/ipc/process.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/client/left_gradients.hpp"
#include "engine/client/openmp.hpp"
#include "engine/client/step_report.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/device_team.hpp"
#include "engine/session/kernels.hpp"
#include "engine/session/step_history.hpp"
#include "engine/session/stored_text.hpp"

namespace accelmgr::client {
namespace {

using session::Activity;
using session::Reason;
using session::RunnerState;

double ms(std::uint64_t ns) { return double(ns) / 1e6; }

session::LossWeights weights_of(const LossScaling& scaling) {
  using session::LossWeights;
  constexpr LossWeights weights[]{LossWeights::micro_batches, LossWeights::samples, LossWeights::none,
                                  LossWeights::field};
  static_assert(std::size(weights) == LossScaling::sum_over + 1);
  return weights[scaling.kind];
}

}  // namespace

LeftGradients left_in(const session::Session& session) {
  const auto steps = session.counters(session.word().index).steps;
  const auto& control = session.control();
  return left_by(steps, control.zeroed_step.load(), session::applied_step(session));
}

Stepper::Stepper(const Config& config, const session::HostView& view, const session::Manifest& manifest,
                 Link& link, EndProcesses end_processes)
    : config_(config),
      view_(view),
      session_(view.session()),
      manifest_(manifest),
      spans_(view.spans()),
      reduction_(view, manifest),
      update_(view, manifest),
      link_(link),
      end_processes_(std::move(end_processes)),
      loss_scaler_(config.runners),
      touched_(view, manifest),
      even_shares_(session::even_shares(static_cast<std::uint32_t>(config.grad_accumulation_steps))) {
  if (config.runners.share == Share::measured) measured_shares_.emplace(config.grad_accumulation_steps);
}

StepResult Stepper::step(const StepOptions& chosen, double timeout_s, StepKind kind,
                         const session::Update* update) {
  const auto begin = base::now_ns();
  const auto number = step_under_way();
  auto options = chosen;
  const auto applied = session::applied_step(session_);
  if (session_.counters(session_.word().index).applied_step == number - 1 && applied > 0) {
    options.accumulate = false;  // What the session has applied is not to be applied again.
    options.parameters_changed = true;
  }
  asked_update_.reset();
  if (update != nullptr) {
    view_.keep_update(*update);
    const auto before = std::max(applied, view_.control().zeroed_step.load());
    const auto added = options.accumulate ? number - 1 - before : 0;
    if (double(added + 1) >= update->divisor) asked_update_ = *update;
  }
  const base::Patience patience(timeout_s, options.interrupted);
  auto& version = view_.control().parameter_version;
  if (version.load() % 2 != 0)
    throw UsageError("step() was called while parameters are being written; end manager.writing() first");
  if (options.repeat) check_repeatable();
  if (options.parameters_changed) version.store(version.load() + 2);

  StepResult result;
  const auto computes = kind == StepKind::outer ? Purpose::compute : Purpose::compute_and_apply;
  auto purpose = computes;
  loss_scaler_.begin_step();
  Outcome outcome;
  for (;;) {
    outcome = assemble(patience, options.repeat);
    if (outcome.status != StepStatus::ok) break;
    if (kind == StepKind::inner) outcome = look_for_newcomer();
    if (outcome.status != StepStatus::ok) break;
    outcome = attempt(purpose, options, patience, result);
    // The supervisor repairs the loss or gives up; or no runner is lost, but their team of devices is.
    if (outcome.status == StepStatus::runner_lost) continue;
    if (outcome.overflow) {
      loss_scaler_.lower();
      ++result.loss_scale_lowered;
      base::log().info("{}; the same elements are tried with loss scale {}", outcome.error,
                       loss_scaler_.scale(committed_loss_scale()));
      continue;
    }
    if (outcome.status == StepStatus::ok && purpose == Purpose::skip) {
      purpose = computes;
      loss_scaler_.begin_step();  // It was lowered in vain: the values were not finite by themselves.
      ++result.skipped;
      continue;
    }
    if (outcome.status == StepStatus::nonfinite && config_.on_nonfinite == NonfinitePolicy::skip_batch &&
        !options.repeat && nonfinite_in_a_row_ < config_.nonfinite_limit) {
      ++nonfinite_in_a_row_;
      base::log().warn("{}; its batches are left out ({} in a row)", outcome.error, nonfinite_in_a_row_);
      purpose = Purpose::skip;
      continue;
    }
    break;
  }
  if (patience.thrown() && !result.counted) std::rethrow_exception(patience.thrown());
  result.status = outcome.status;
  result.error = std::move(outcome.error);
  result.error_type = std::move(outcome.error_type);
  result.rank = outcome.rank;
  if (result.status == StepStatus::runner_lost) result.causes = last_causes(session_);
  if (result.status == StepStatus::manager_lost && manager_loss_) result.causes = {*manager_loss_};
  fill(result, session_, config_.loss_scaling.field);
  refuse_without_weight(result);
  if (result.counted) nonfinite_in_a_row_ = result.nonfinite ? nonfinite_in_a_row_ + 1 : 0;
  if (result.counted && kind != StepKind::outer) inner_members_ = members_of(participants_);
  if (result.counted) touched_.committed(result.attempt, options.accumulate);
  if (result.counted && !options.accumulate) view_.control().zeroed_step.store(result.step - 1);
  if (result.counted && measured_shares_) measure();
  const auto end = base::now_ns();
  result.step_ms = ms(static_cast<std::uint64_t>(end - begin));
  result.wait_ms = std::max(0.0, result.step_ms - result.compute_ms - result.reduce_ms);
  session::record_step(view_, record_of(result));
  spans_.record({.begin_ns = begin,
                 .end_ns = end,
                 .step = number,
                 .attempt = result.attempt,
                 .pid = 0,
                 .rank = -1,
                 .activity = Activity::step});
  base::log().debug("{}: loss {}, {} samples, {} attempts, {:.3f} ms", to_string(result.status), result.loss,
                    result.samples, result.tries, result.step_ms);
  base::set_log_step(result.step + 1);
  if (patience.thrown()) std::rethrow_exception(patience.thrown());  // Too late: the attempt was committed.
  return result;
}

// Each runner sees its own micro-batches alone: only when a step is committed is it known that its total is
// 0.
void Stepper::refuse_without_weight(StepResult& result) const {
  const auto& field = config_.loss_scaling.field;
  if (!result.counted || field.empty() || session::tally(session_, session_.control().request).weight != 0)
    return;
  result.nonfinite = true;
  const auto text = fmt::format(
      "'{}' of the model's outputs adds up to 0 over all micro-batches of the step, so there is nothing to "
      "divide by (loss_scaling sum_over({})); the step has added nothing to the gradients",
      field, field);
  if (config_.on_nonfinite != NonfinitePolicy::abort || result.status != StepStatus::ok)
    return base::log().warn("{}", text);
  result.status = StepStatus::nonfinite;
  result.error = text;
}

Stepper::Outcome Stepper::call(int rank, double timeout_s) {
  const std::function<bool()> interrupted = base::interrupted;
  const base::Patience patience(timeout_s, interrupted);
  auto outcome = assemble(patience);
  if (outcome.status == StepStatus::ok && (participants_ >> rank & 1) == 0)
    throw UsageError(fmt::format("call(): the team has no rank {}", rank));
  StepResult result;
  if (outcome.status == StepStatus::ok)
    outcome = attempt(Purpose::call, {.repeat = true, .parameters_changed = false}, patience, result, rank);
  if (outcome.status == StepStatus::runner_lost) assemble(patience);  // Then its loss is on record.
  if (patience.thrown()) std::rethrow_exception(patience.thrown());
  return outcome;
}

void Stepper::check_repeatable() const {
  if (session_.header().keeps_last_step == 0)
    throw UsageError(
        "a step can be repeated only if its elements are kept in memory: set data.keep_last_step to true");
  if (session_.counters(session_.word().index).last_elements == 0)
    throw UsageError(
        "there is no step to repeat: none was made since the start, or its batches were left out");
}

void Stepper::zero_gradients() {
  const session::SpanScope span(spans_, Activity::zero_grad, step_under_way());
  auto& control = view_.control();
  const auto steps = step_under_way() - 1;
  control.applied_step.store(steps);  // Gradients that are zeroed in part are not to be applied.
  // One thread with stores past the cache (128 MiB: 1.5 ms) is faster than torch's zero_() with two (3.7 ms).
  session::best_kernels().zero(view_.gradients(), session_.header().bytes.gradients);
  if (session_.control().unfrozen_bytes.load() != 0)
    for (std::size_t i = 0; i < manifest_.tensors.size(); ++i)
      if (const auto& entry = manifest_.tensors[i];
          entry.group == session::Group::frozen && session::has_gradient(session_, manifest_, i))
        session::best_kernels().zero(view_.gradients() + entry.gradient, entry.gradient_bytes());
  control.zeroed_step.store(steps);
  touched_.none();
}

std::uint64_t Stepper::step_under_way() const noexcept {
  return session_.counters(session_.word().index).steps + 1;
}

// An attempt can open when every rank of the team is ready, its pidfd is here, its working state is that of
// the last commit, and elements are assigned to exactly these ranks. Until then the host waits for the
// supervisor and the loader.
Stepper::Outcome Stepper::assemble(const base::Patience& patience, bool repeat) {
  const session::SpanScope span(spans_, Activity::assemble, step_under_way());
  const auto& control = session_.control();
  for (;;) {
    const auto seen = ipc::load(control.readiness);
    if (manager_loss_ || link_.manager_ended()) return manager_lost(session_.word().attempt);
    const bool closes = service_closes();
    if (control.given_up.load() != 0) return lost();  // A service closes for it: this is the cause.
    if (closes) return {StepStatus::manager_lost, "the service is being stopped and makes no more steps"};
    const auto team = control.team.load();
    if (repeat && team != session_.counters(session_.word().index).participants)
      return {
          StepStatus::runner_lost,
          "the team has changed since the last step, and others have its elements: it cannot be repeated"};
    // The loader follows a request to assign only when the data source returns. Until then no rank may read
    // its queue, and the host must not make another request.
    if (team_ready(team) && loader_follows()) {
      const session::Assignment wanted{team, repeat ? control.assignment.shares : shares_for(team)};
      if (control.assignment == wanted) {
        participants_ = team;
        return {};
      }
      view_.ask_for(wanted);
    }
    if (patience.over())
      return {StepStatus::timeout,
              fmt::format(
                  "no attempt could begin {}: {}{}{}{}", patience.bound(), phases_of(session_, config_, team),
                  loader_follows() ? "" : "; elements cannot be assigned until the data source returns",
                  link_.unread().empty() ? "" : "; ", link_.unread())};
    ipc::wait_changed(control.readiness, seen, patience.next_look_ns(), 0);
  }
}

bool Stepper::team_ready(session::RankMask team) {
  const auto word = session_.word();
  if (!word.closed) return false;
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    if ((team >> rank & 1) == 0) continue;
    const auto& record = session_.record(rank);
    if (record.state.load() != RunnerState::ready || record.acknowledged_attempt.load() < word.attempt)
      return false;
    const auto generation = record.generation.load();
    if (!link_.holds(rank, generation)) link_.take_notices();
    if (!link_.holds(rank, generation) || link_.runner_ended(rank)) return false;
  }
  return true;
}

/// Throws SessionError when another host drives the session.
bool Stepper::service_closes() const {
  if (link_.lease() == 0) return false;  // This host has started the manager.
  const auto& control = session_.control();
  if (const auto lease = control.lease.load(); lease != link_.lease())
    throw SessionError(
        fmt::format("this host does not drive the session any more: its lease was {}, and the "
                    "service has given lease {} since",
                    link_.lease(), lease));
  return control.closing.load() != 0;
}

bool Stepper::loader_follows() const noexcept {
  return session_.sharding().follows.load(std::memory_order_acquire) == session_.control().assignments.load();
}

const session::Shares& Stepper::shares_for(session::RankMask team) {
  return measured_shares_ ? measured_shares_->shares_for(team) : even_shares_;
}

// Call it after a committed step.
void Stepper::measure() {
  const auto& request = session_.control().request;
  MicroBatchTimes times{};
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    const auto& ballot = session_.record(rank).ballot;
    if ((request.participants >> rank & 1) == 0 || ballot.micro_batches == 0) continue;
    times[static_cast<std::size_t>(rank)] =
        std::max<std::uint64_t>(1, ballot.compute_ns / ballot.micro_batches);
  }
  if (!measured_shares_->note(times)) return;
  const auto& shares = measured_shares_->shares_for(request.participants);
  std::string text;
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    if ((request.participants >> rank & 1) == 0) continue;
    text += fmt::format("{}rank {} computes {} ({:.3f} ms each)", text.empty() ? "" : ", ", rank,
                        shares.of[rank], ms(measured_shares_->times()[static_cast<std::size_t>(rank)]));
  }
  base::log().info("from the next step on, of its {} micro-batches {}",
                   session::total_of(shares, request.participants), text);
}

const session::LossScale& Stepper::committed_loss_scale() const noexcept {
  return session_.counters(session_.word().index).loss_scale;
}

// A team that could not be made is not tried again with the same processes.
session::DeviceTeam Stepper::device_team() noexcept {
  const auto team = session::plan_device_team(session_, participants_);
  team_members_ = members_of(team.ranks);
  return team_members_ == failed_team_ ? session::DeviceTeam{} : team;
}

Stepper::Members Stepper::members_of(session::RankMask ranks) const noexcept {
  Members members{};
  for (int rank = 0; rank < session_.ranks(); ++rank)
    if ((ranks >> rank & 1) != 0)
      members[static_cast<std::size_t>(rank)] = session_.record(rank).generation.load();
  return members;
}

// A runner that takes the place of another has not made the inner steps before: the host brings it what it
// lacks.
Stepper::Outcome Stepper::look_for_newcomer() const {
  const auto now = members_of(participants_);
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    const auto i = static_cast<std::size_t>(rank);
    if (now[i] != 0 && now[i] != inner_members_[i])
      return {StepStatus::runner_lost,
              fmt::format("runner {} has taken the place of another, and lacks its inner steps: {}", rank,
                          text_of(last_causes(session_))),
              rank};
  }
  return {};
}

void Stepper::team_failed(const Outcome& outcome) {
  failed_team_ = team_members_;
  base::log().warn(
      "rank {}: {}; the step is tried again, and gradients go through the session, not over NCCL, "
      "until a runner of the team is replaced or the team changes",
      outcome.rank, outcome.error);
}

/// As many micro-batches for each rank as in the last committed attempt.
session::Shares Stepper::last_shares() const noexcept {
  session::Shares shares{};
  const auto& counters = session_.counters(session_.word().index);
  for (int rank = 0; rank < session_.ranks(); ++rank)
    shares.of[rank] = static_cast<std::uint32_t>(counters.last_batches[rank]);
  return shares;
}

Stepper::Outcome Stepper::attempt(Purpose purpose, const StepOptions& options, const base::Patience& patience,
                                  StepResult& result, int calling_rank) {
  const double loss_scale = loss_scaler_.scale(committed_loss_scale());
  session::SpanScope span(spans_, Activity::attempt, step_under_way());
  const auto& control = session_.control();
  const bool skip = purpose == Purpose::skip || purpose == Purpose::call;
  const bool applies = purpose == Purpose::compute_and_apply;
  const bool updates = purpose == Purpose::compute && asked_update_;
  const bool keep =
      config_.on_nonfinite == NonfinitePolicy::keep && nonfinite_in_a_row_ < config_.nonfinite_limit;
  release_idle_threads();
  const auto attempt = session::open_attempt(
      view_, {.participants = participants_,
              .accumulate = options.accumulate,
              .shares = options.repeat ? last_shares() : session_.sharding().shares,
              .batch_size = static_cast<std::uint32_t>(config_.batch_size_per_device),
              .loss_weights = weights_of(config_.loss_scaling),
              .mean_buffers = config_.buffers.policy == BufferPolicy::mean,
              .refuse_nonfinite = !keep,
              .refuse_overflow = loss_scaler_.can_lower(loss_scale),
              .skip = skip,
              .repeat = options.repeat,
              .call = purpose == Purpose::call ? static_cast<std::uint32_t>(calling_rank) + 1 : 0,
              .applies = updates                                 ? session::Applies::session
                         : !applies                              ? session::Applies::host
                         : __builtin_popcount(participants_) > 1 ? session::Applies::replicas
                                                                 : session::Applies::one_replica,
              .update = updates ? *asked_update_ : session::Update{},
              .device_team = skip ? session::DeviceTeam{} : device_team(),
              .parameter_version = control.parameter_version.load(),
              .loss_scale = loss_scale,
              .next_loss_scale = loss_scaler_.after(committed_loss_scale(), loss_scale)});
  if (attempt == 0) throw SessionError("the previous attempt was never closed");
  base::log().debug("attempt {} is open for the ranks of mask {:#x}", attempt, participants_);
  span.set_attempt(attempt);
  result.attempt = attempt;
  result.loss_scale = loss_scale;
  result.tries += skip ? 0 : 1;
  auto outcome = wait(attempt, patience);
  if (outcome.status == StepStatus::ok && applies) result.grad_norm = wait_applied(attempt, patience);
  if (outcome.status == StepStatus::ok && session::updates_parameters(session_))
    result.grad_norm = session::gradient_norm(session_);
  const auto word = session_.word();
  result.counted = !skip && word.attempt == attempt && word.closed && !word.abort;
  if (outcome.team_failed) {
    team_failed(outcome);
  } else if (outcome.status != StepStatus::ok)
    base::log().info("attempt {} ended without a result: {}{}{}", attempt, to_string(outcome.status),
                     outcome.error.empty() ? "" : ": ", outcome.error);
  return outcome;
}

bool Stepper::participant_ended() const noexcept {
  for (int rank = 0; rank < session_.ranks(); ++rank)
    if ((participants_ >> rank & 1) != 0 && link_.runner_ended(rank)) return true;
  return false;
}

Stepper::Outcome Stepper::wait(std::uint64_t attempt, const base::Patience& patience) {
  // The host spins only on a core that the runners do not need: they compute meanwhile.
  static const int cores = ipc::allowed_cores();
  const int spin_us = cores > __builtin_popcount(participants_) ? config_.runners.spin_us : 0;
  Wait wait{.patience = patience};
  for (;;) {
    const auto& finish = session_.control().finish;
    const auto seen = ipc::load(finish);
    const auto word = session_.word();
    switch (next_action(word, participants_, observe(word, wait))) {
      case Action::report_abort:
        session::close_if_over(view_, attempt);
        return why_aborted(word.mask);
      case Action::return_result:
        return {};
      case Action::close:
        session::close_if_over(view_, attempt);
        break;
      case Action::end_without_manager:
        return manager_lost(attempt);
      case Action::abort_for_supervisor:
        session::abort_attempt(view_, attempt, session::author_supervisor);
        break;
      case Action::abort_for_host: {
        // The text is made before the abort: runners leave their phases as soon as they see it.
        auto text = fmt::format("no result {}: {}", patience.bound(),
                                phases_of(session_, config_, participants_, &wait.standings));
        if (!session::abort_attempt(view_, attempt, session::author_host)) break;
        session::close_if_over(view_, attempt);
        return {StepStatus::timeout, std::move(text), -1};
      }
      case Action::leave:
        throw ServiceStands(fmt::format(
            "the service (pid {}) has stood still since step {} was committed, and may be paused: "
            "{}. This host has left the session, and its gradients are not complete; attach again "
            "when the service runs",
            link_.manager_pid(), step_under_way(),
            phases_of(session_, config_, participants_, &wait.standings)));
      case Action::wait:
        ipc::wait_changed(finish, seen,
                          word.committed(participants_) ? timing::look_ns : patience.next_look_ns(), spin_us);
        wait.parked = true;
    }
  }
}

// Only what the state of the word calls for: most looks are system calls, and a short step must not make
// them.
Observed Stepper::observe(const session::StepWord& word, Wait& wait) {
  Observed observed;
  if (word.abort || word.closed) return observed;
  if (word.committed(participants_)) {
    observed.is_done = session::is_done(session_, word.attempt);
    if (observed.is_done) return observed;
    if (wait.parked) wait.standings.look(session_);  // As below.
    std::uint64_t progress = 0;
    for (int rank = 0; rank < session_.ranks(); ++rank) progress += session_.reduction_progress(rank);
    const double stood_s = timing::seconds(wait.stall_timer.look(progress, base::now_ns()));
    observed.slices_stand = stood_s > config_.runners.reduction_timeout + timing::reduction_by_host_margin_s;
    observed.of_service = link_.lease() != 0;
    observed.patience_over = observed.slices_stand && observed.of_service && wait.patience.over();
    observed.manager_ended = link_.manager_ended();
    return observed;
  }
  observed.participant_ended = participant_ended();
  observed.manager_ended = link_.manager_ended();
  if (observed.participant_ended || observed.manager_ended) return observed;
  if (wait.parked)
    wait.standings.look(session_);  // Not before the first wait: that would delay a short step.
  observed.patience_over = wait.patience.over();
  return observed;
}

// The gradients are the host's when this returns: the attempt is committed, so it is waited for beyond the
// patience of a step. The supervisor ends a runner that takes longer than step_timeout; this process goes on
// without an answer only if that does not move, either. A runner that dies meanwhile is noticed in the next
// step.
double Stepper::wait_applied(std::uint64_t attempt, const base::Patience& patience) {
  const auto& readiness = session_.control().readiness;
  const auto deadline = base::Deadline::in_seconds(config_.step_timeout + timing::reduction_by_host_margin_s);
  for (;;) {
    const auto seen = ipc::load(readiness);
    bool applied = true;
    double norm = 0;
    for (int rank = 0; rank < session_.ranks(); ++rank) {
      if ((participants_ >> rank & 1) == 0) continue;
      const auto& record = session_.record(rank);
      if (record.acknowledged_attempt.load() >= attempt)
        norm = record.grad_norm.load();  // That of all of them.
      else
        applied = false;
    }
    if (applied || participant_ended() || link_.manager_ended() || patience.was_interrupted() ||
        deadline.passed())
      return norm;
    ipc::wait_changed(readiness, seen, timing::look_ns, 0);
  }
}

Stepper::Outcome Stepper::why_aborted(std::uint32_t author) const {
  if (author == session::author_supervisor) return {StepStatus::runner_lost};
  const int rank = static_cast<int>(author);
  const auto& record = session_.record(rank);
  switch (record.reason.load()) {
    case Reason::data_end:
      return {StepStatus::data_end, session::text_of(record.error), rank};
    case Reason::data_error:
      return {
          StepStatus::data_end,
          fmt::format("the data source '{}' failed: {}", config_.data.kind, session::text_of(record.error)),
          rank, "DataError"};
    case Reason::nonfinite:
    case Reason::overflow:
      return {.status = StepStatus::nonfinite,
              .error = fmt::format("rank {}: {}", rank, session::text_of(record.error)),
              .rank = rank,
              .overflow = record.reason.load() == Reason::overflow};
    case Reason::team:
    case Reason::lost_with_another:
      return {.status = StepStatus::runner_lost,
              .error = session::text_of(record.error),
              .rank = rank,
              .team_failed = true};
    case Reason::parameters_changed:
      throw UsageError(
          fmt::format("rank {}: {}; write parameters between steps", rank, session::text_of(record.error)));
    default:
      return {StepStatus::runner_lost};
  }
}

// The supervisor has given up: reports the losses that it found.
Stepper::Outcome Stepper::lost() const {
  const auto causes = last_causes(session_);
  const auto& control = session_.control();
  Outcome outcome{StepStatus::runner_lost};
  if (config_.runners.on_loss != LossPolicy::fail)
    outcome.error = fmt::format("{}: ", session::text_of(control.given_up_why));
  outcome.error += text_of(causes);
  if (causes.empty()) return outcome;
  outcome.rank = causes.back().rank;
  const auto& last = session_.incident(control.incidents.load());
  if (last.reason == Reason::model_error) outcome.error_type = "ModelError";
  return outcome;
}

// No other process can finish a committed attempt: all have ended, or they do not move. Ends those that are
// left, then finishes the attempt here. Throws SessionError if a participant cannot be ended: it may go on,
// and would add to what this process has added.
Stepper::Outcome Stepper::manager_lost(std::uint64_t attempt) {
  if (!manager_loss_) {
    const auto time_s =
        double(std::chrono::system_clock::now().time_since_epoch() / std::chrono::milliseconds(1)) / 1e3;
    const int pid = link_.manager_pid();
    link_.take_notices();  // Of processes that were replaced just before the attempt was opened.
    if (link_.lease() == 0) link_.kill();
    auto& loss = manager_loss_.emplace();
    loss.time_s = time_s;
    loss.pid = pid;
    loss.step = step_under_way();
    loss.attempt = attempt;
    loss.exit = end_processes_();
    loss.what = "the manager process is gone";
    base::log().info("the manager (pid {}) is lost: {}", pid, loss.exit);
  }
  const session::RankMask participants = session_.control().request.participants;
  session::abort_attempt(view_, attempt, session::author_host);
  if (session_.word().committed(participants)) {
    for (int rank = 0; rank < session_.ranks(); ++rank)
      if ((participants >> rank & 1) != 0 && !link_.runner_ended(rank))
        throw SessionError(
            fmt::format("the manager process is gone: {}; but runner {} (pid {}) cannot be ended by this "
                        "process, and may not have reduced its part of step {}. Gradients are not complete",
                        manager_loss_->exit, rank, session_.record(rank).pid.load(), step_under_way()));
    // A replacement that was ready just before the attempt was opened takes part, and this process may not
    // have heard of it. The fork server ends after its last runner.
    if (!link_.fork_server_ended())
      throw SessionError(
          fmt::format("the manager process is gone: {}; but its fork server cannot be ended by this process, "
                      "and a runner may not have reduced its part of step {}. Gradients are not complete",
                      manager_loss_->exit, step_under_way()));
    const auto for_each = [&](auto&& finish) {
      for (int rank = 0; rank < session_.ranks(); ++rank)
        if ((participants >> rank & 1) != 0) finish.finish_slice(rank, attempt);
    };
    for_each(reduction_);
    if (session::updates_parameters(session_)) for_each(update_);
  }
  session::close_if_over(view_, attempt);
  return {StepStatus::manager_lost, "the manager process is gone: " + manager_loss_->exit, -1};
}

bool Stepper::manager_is_lost() {
  if (!manager_loss_ && link_.manager_ended()) manager_lost(session_.word().attempt);
  return manager_loss_.has_value();
}

}  // namespace accelmgr::client
