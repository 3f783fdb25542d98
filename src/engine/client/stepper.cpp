#include "engine/client/stepper.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "base/interruption.hpp"
#include "base/log.hpp"
#include "engine/client/openmp.hpp"
#include "engine/client/step_report.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/kernels.hpp"
#include "engine/session/sequence_lock.hpp"
#include "engine/session/step_history.hpp"

namespace accelmgr::client {
namespace {

using session::Activity;

double ms(std::uint64_t ns) { return double(ns) / 1e6; }

session::LossWeights weights_of(const LossScaling& scaling) {
  using session::LossWeights;
  constexpr LossWeights weights[]{LossWeights::micro_batches, LossWeights::samples, LossWeights::none,
                                  LossWeights::field};
  static_assert(std::size(weights) == LossScaling::sum_over + 1);
  return weights[scaling.kind];
}

}  // namespace

Stepper::Stepper(const Config& config, const session::HostView& view, const session::Manifest& manifest,
                 Link& link, LostManager::EndProcesses end_processes)
    : config_(config),
      view_(view),
      session_(view.session()),
      manifest_(manifest),
      spans_(view.spans()),
      lost_manager_(view, manifest, link, std::move(end_processes)),
      assembly_(config, view, link, lost_manager_),
      wait_(config, view, link, lost_manager_),
      loss_scaler_(config.runners),
      touched_(view, manifest) {}

StepResult Stepper::step(const StepOptions& chosen, double timeout_s, StepKind kind,
                         const session::Update* update) {
  const auto begin = base::now_ns();
  const auto number = step_under_way();
  auto options = chosen;
  const auto applied = session::applied_step(session_);
  if (session_.counters(session_.word().index).updated_step == number - 1 && applied > 0) {
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
  const base::Patience patience(timeout_s, base::asks_interrupted);
  auto& version = view_.control().parameter_version;
  if (session::is_written(version))
    throw UsageError("step() was called while parameters are being written; end manager.writing() first");
  if (options.repeat) check_repeatable();
  if (options.parameters_changed) version.store(version.load() + 2);

  StepResult result;
  const auto computes = kind == StepKind::outer ? Purpose::compute : Purpose::compute_and_apply;
  auto purpose = computes;
  loss_scaler_.begin_step();
  Outcome outcome;
  for (;;) {
    outcome = assembly_.assemble(patience, options.repeat);
    if (outcome.status != StepStatus::ok) break;
    if (kind == StepKind::inner) outcome = assembly_.look_for_newcomer();
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
  if (result.status == StepStatus::manager_lost && lost_manager_.loss())
    result.causes = {*lost_manager_.loss()};
  fill(result, session_, config_.loss_scaling.field);
  refuse_without_weight(result);
  if (result.counted) nonfinite_in_a_row_ = result.nonfinite ? nonfinite_in_a_row_ + 1 : 0;
  if (result.counted && kind != StepKind::outer) assembly_.inner_step_made();
  if (result.counted) touched_.committed(result.attempt, options.accumulate);
  if (result.counted && !options.accumulate) view_.control().zeroed_step.store(result.step - 1);
  if (result.counted) assembly_.measure();
  const auto end = base::now_ns();
  result.step_ms = ms(static_cast<std::uint64_t>(end - begin));
  result.wait_ms = std::max(0.0, result.step_ms - result.compute_ms - result.reduce_ms);
  session::record_step(view_, session::record_of(result));
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

Outcome Stepper::call(int rank, double timeout_s) {
  const base::Patience patience(timeout_s, base::asks_interrupted);
  auto outcome = assemble(patience);
  if (outcome.status == StepStatus::ok && (assembly_.participants() >> rank & 1) == 0)
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
  control.host_applied_step.store(steps);  // Gradients that are zeroed in part are not to be applied.
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

const session::LossScale& Stepper::committed_loss_scale() const noexcept {
  return session_.counters(session_.word().index).loss_scale;
}

/// As many micro-batches for each rank as in the last committed attempt.
session::Shares Stepper::last_shares() const noexcept {
  session::Shares shares{};
  const auto& counters = session_.counters(session_.word().index);
  for (int rank = 0; rank < session_.ranks(); ++rank)
    shares.of[rank] = static_cast<std::uint32_t>(counters.last_batches[rank]);
  return shares;
}

Outcome Stepper::attempt(Purpose purpose, const StepOptions& options, const base::Patience& patience,
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
  const auto participants = assembly_.participants();
  const auto attempt = session::open_attempt(
      view_, {.participants = participants,
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
              .applies = updates                                ? session::Applies::session
                         : !applies                             ? session::Applies::host
                         : __builtin_popcount(participants) > 1 ? session::Applies::replicas
                                                                : session::Applies::one_replica,
              .update = updates ? *asked_update_ : session::Update{},
              .device_team = skip ? session::DeviceTeam{} : assembly_.device_team(),
              .parameter_version = control.parameter_version.load(),
              .loss_scale = loss_scale,
              .next_loss_scale = loss_scaler_.after(committed_loss_scale(), loss_scale)});
  if (attempt == 0) throw SessionError("the previous attempt was never closed");
  base::log().debug("attempt {} is open for the ranks of mask {:#x}", attempt, participants);
  span.set_attempt(attempt);
  result.attempt = attempt;
  result.loss_scale = loss_scale;
  result.tries += skip ? 0 : 1;
  auto outcome = wait_.until_over(attempt, participants, patience);
  if (outcome.status == StepStatus::ok && applies)
    result.grad_norm = wait_.until_applied(attempt, participants, patience);
  if (outcome.status == StepStatus::ok && session::updates_parameters(session_))
    result.grad_norm = session::gradient_norm(session_);
  const auto word = session_.word();
  result.counted = !skip && word.attempt == attempt && word.closed && !word.abort;
  if (outcome.device_team_failed) {
    assembly_.device_team_failed(outcome);
  } else if (outcome.status != StepStatus::ok)
    base::log().info("attempt {} ended without a result: {}{}{}", attempt, to_string(outcome.status),
                     outcome.error.empty() ? "" : ": ", outcome.error);
  return outcome;
}

}  // namespace accelmgr::client
