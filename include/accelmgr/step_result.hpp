// The options of step(), and its result.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/failure.hpp"

namespace accelmgr {

struct OptimizerConfig;

struct StepOptions {
  std::optional<double> timeout_s{};  ///< 0 or more; default: `step_timeout` of the configuration.
  bool accumulate = true;             ///< false: overwrite the master gradients; no zero_grad() is needed.
  bool repeat = false;             ///< true: use the elements of the last step again (data.keep_last_step).
  bool parameters_changed = true;  ///< false: the host wrote no parameter since the last step.
  /// An inner step: the session makes this update with the mean gradient, as a part of the step. See
  /// Manager::step(). null: the host applies the gradients.
  const OptimizerConfig* optimizer = nullptr;
  std::int64_t total_updates = 0;  ///< The update at which the cosine schedule of `optimizer` ends.
  /// Called every 20 ms until the step is committed, and after a signal. When it returns true, the step ends
  /// as after a timeout.
  std::function<bool()> interrupted{};
};

/// Gradients of committed steps that a host of a service finds in the master.
enum class LeftGradients {
  none,
  unapplied,  ///< No parameter was written since the last of these steps.
  applied,    ///< A host has begun to write parameters since, or to zero the gradients.
};

enum class StepStatus {
  ok,            ///< The mean gradient of this step is in the master.
  data_end,      ///< The data source ended before the step was complete.
  runner_lost,   ///< A runner died or failed, and `runners.on_loss` does not allow the run to go on.
  nonfinite,     ///< A loss or gradient was not finite; policy `abort`, or beyond `nonfinite_limit`.
  timeout,       ///< The deadline passed.
  manager_lost,  ///< The manager process has ended. The handle can be read, stopped and recover()ed.
};

/// `ok`, `data_end`, ...
const char* to_string(StepStatus status) noexcept;

struct StepResult {
  StepStatus status = StepStatus::ok;
  bool counted = false;       ///< True if the step was committed: all of it counts. False: nothing of it.
  std::uint64_t step = 0;     ///< Committed steps of this session, including this one if it counted.
  std::uint64_t attempt = 0;  ///< Number of the last attempt; never reused.
  double loss = 0;            ///< Mean over micro-batches, or as `loss_scaling` says; 0 when not counted.
  std::uint64_t samples = 0;  ///< Elements that took part; 0 when not counted.
  std::vector<std::pair<std::string, double>>
      scalars{};                        ///< Other numbers of the model, averaged like the loss.
  std::uint64_t parameter_version = 0;  ///< Version of the parameters that all runners used.
  bool nonfinite = false;               ///< A loss or gradient was not finite, and the policy is `keep`.
  double step_ms = 0;                   ///< From the call to its return.
  double compute_ms = 0;                ///< Forward, backward and gradient capture of the slowest runner.
  double reduce_ms = 0;                 ///< Reduction of the slowest runner.
  double wait_ms = 0;   ///< The rest of step_ms: triggers, waiting for data and for other processes.
  double data_ms = 0;   ///< The longest time that a runner waited for batches; others may have computed.
  std::string error{};  ///< Empty when ok. First cause first: rank, phase, signal or exit code, what().
  std::string
      error_type{};  ///< Type of the exception behind it (`ModelError`, `DataError`, ...); empty if none.
  int rank = -1;     ///< The runner at fault, -1 if none.
  std::uint32_t participants = 0;  ///< Runners that took part; 0 when not counted.
  std::uint32_t tries = 0;         ///< Attempts that were made for this step; 1 if nothing went wrong.
  std::uint32_t skipped = 0;       ///< How many of `tries` had their batches left out (`skip_batch`).
  double grad_norm = 0;  ///< Inner step: norm of the mean gradient before clipping; 0 without clipping.
  std::uint32_t repeated =
      0;  ///< Inner steps that were lost with a runner, and made again since the result before.
  double loss_scale = 1;  ///< The factor of the loss in the last attempt; 1 unless autocast is fp16.
  std::uint32_t loss_scale_lowered = 0;  ///< How many of `tries` had infinite gradients, and halved it.
  std::vector<Failure>
      causes{};  ///< Losses behind a runner_lost or manager_lost, first cause first, at most 3.

  explicit operator bool() const noexcept { return status == StepStatus::ok; }
};

}  // namespace accelmgr
