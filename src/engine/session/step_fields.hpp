// The fields of a step's result, listed once. StepResult of Python, and the steps in a service's answers,
// follow from this list. So do the records of the step history from the shorter one.
#pragma once

#include "accelmgr/step_result.hpp"
#include "engine/session/layout.hpp"

namespace accelmgr::session {

/// told: those that a service tells its clients. The others are of the host that made the step.
enum class StepFields { all, told };

/// Calls field(name, member of StepResult, text for users) for each, in the order in which users see them.
template <StepFields fields, class Visit>
void each_step_field(Visit&& field) {
  field("status", &StepResult::status, "What became of the step.");
  field("counted", &StepResult::counted,
        "True if the step was committed: then all of it counts. Otherwise nothing of it does.");
  field("step", &StepResult::step,
        "The number of committed steps of this session, this one included if it counted.");
  field("attempt", &StepResult::attempt, "The number of the last attempt; never reused.");
  field("loss", &StepResult::loss,
        "Mean over micro-batches, or as `loss_scaling` says; NaN when not counted (0 in to_dict()).");
  field("samples", &StepResult::samples, "Elements that took part; 0 when not counted.");
  field(
      "scalars", &StepResult::scalars,
      "Other numbers of the model, averaged like the loss; at most 16: a warning names those beyond, once.");
  field("parameter_version", &StepResult::parameter_version,
        "The version of the parameters with which all runners computed.");
  field("nonfinite", &StepResult::nonfinite, "True if a value was not finite and the policy is `keep`.");
  field("step_ms", &StepResult::step_ms, "Time from the call of step() to its return.");
  field("compute_ms", &StepResult::compute_ms,
        "Time of forward, backward and gradient capture in the slowest runner.");
  field("reduce_ms", &StepResult::reduce_ms, "Time of the reduction in the slowest runner.");
  field("wait_ms", &StepResult::wait_ms,
        "step_ms without compute_ms and reduce_ms: triggers, waiting for data and for each other.");
  field("data_ms", &StepResult::data_ms,
        "How long the runner that waited longest for batches did so. Other runners may have computed.");
  field("error", &StepResult::error,
        "The causes, first cause first, with rank, phase, signal or exit code, exception. Empty when ok.");
  field("error_type", &StepResult::error_type,
        "The type of the exception that caused it (`ModelError`, `DataError`, ...); empty if none did.");
  field("rank", &StepResult::rank, "The runner at fault, -1 if none.");
  field("participants", &StepResult::participants, "Runners that took part; 0 when not counted.");
  field("tries", &StepResult::tries, "Number of attempts for this step; 1 if nothing went wrong.");
  field("skipped", &StepResult::skipped,
        "Number of these attempts whose batches were left out (`on_nonfinite: skip_batch`).");
  field(
      "grad_norm", &StepResult::grad_norm,
      "The norm of the mean gradient before it was clipped, of an inner step with `clip_grad_norm`; else 0.");
  if constexpr (fields == StepFields::all)
    field("repeated", &StepResult::repeated,
          "Number of inner steps that were lost with a runner, and made again since the result before.");
  field("loss_scale", &StepResult::loss_scale,
        "The factor of the loss in the last attempt; 1 unless `runners.autocast` is `fp16`.");
  field("loss_scale_lowered", &StepResult::loss_scale_lowered,
        "Number of these attempts whose gradients were infinite, so that the factor was halved.");
  if constexpr (fields == StepFields::all)
    field("causes", &StepResult::causes,
          "The losses that caused runner_lost or manager_lost, first cause first; at most 3.");
}

/// Calls field(name, member of StepResult, member of StepRecord) for each that the step history keeps. Times
/// are in ms in the result, in ns in the record.
template <class Visit>
void each_recorded_field(Visit&& field) {
  field("step", &StepResult::step, &StepRecord::step);
  field("attempt", &StepResult::attempt, &StepRecord::attempt);
  field("status", &StepResult::status, &StepRecord::status);
  field("counted", &StepResult::counted, &StepRecord::counted);
  field("loss", &StepResult::loss, &StepRecord::loss);
  field("samples", &StepResult::samples, &StepRecord::samples);
  field("participants", &StepResult::participants, &StepRecord::participants);
  field("tries", &StepResult::tries, &StepRecord::tries);
  field("step_ms", &StepResult::step_ms, &StepRecord::duration_ns);
  field("compute_ms", &StepResult::compute_ms, &StepRecord::compute_ns);
  field("reduce_ms", &StepResult::reduce_ms, &StepRecord::reduce_ns);
  field("wait_ms", &StepResult::wait_ms, &StepRecord::wait_ns);
  field("data_ms", &StepResult::data_ms, &StepRecord::data_ns);
}

}  // namespace accelmgr::session
