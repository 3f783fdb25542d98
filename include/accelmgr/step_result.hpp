// What one step() did.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace accelmgr {

enum class StepStatus {
  ok,            ///< The mean gradient of this step is in the master.
  data_end,      ///< The data source ended before the step was complete.
  runner_lost,   ///< A runner died or failed, and `runners.on_loss` does not, or no longer, make up for it.
  nonfinite,     ///< A loss or gradient was not finite, and the policy is `abort`, or has let pass too many.
  timeout,       ///< The deadline passed.
  manager_lost,  ///< The manager process is gone; the handle can be read, stopped and recover()ed.
};

/// How a process was lost, as the supervisor found it.
struct FailureCause {
  double time_s = 0;  ///< Since 1970, UTC.
  int rank = -1;      ///< -1: no runner, but the launcher or the manager.
  int pid = 0;
  std::string phase{};
  std::uint64_t step = 0;          ///< The one under way, counted from 1.
  std::uint64_t attempt = 0;       ///< The last it took part in.
  std::string exit{};              ///< "killed by signal 9 (KILL)", "exit code 17".
  std::string what{};              ///< Its exception, or why it was ended; may be empty.
  std::vector<std::string> log{};  ///< Its last log lines.
};

/// `ok`, `data_end`, ...
const char* to_string(StepStatus status) noexcept;

struct StepResult {
  StepStatus status = StepStatus::ok;
  bool counted = false;    ///< Whether the master gradients contain this step. Either in full or not at all.
  std::uint64_t step = 0;  ///< Committed steps of this session, this one included if it counted.
  std::uint64_t attempt = 0;  ///< Never reused.
  double loss = 0;  ///< Mean over micro-batches (or samples, by `loss_scaling`); 0 when not counted.
  std::uint64_t samples = 0;  ///< Elements that took part; 0 when not counted.
  std::vector<std::pair<std::string, double>>
      scalars{};                        ///< Other numbers of the model, averaged like the loss.
  std::uint64_t parameter_version = 0;  ///< The version all runners computed with.
  bool nonfinite = false;               ///< Something was not finite, and the policy is `keep`.
  double step_ms = 0;                   ///< From the call to its return.
  double compute_ms = 0;  ///< Forward, backward and take-over of gradients; the slowest runner's.
  double reduce_ms = 0;   ///< Reduction; the slowest runner's.
  double wait_ms = 0;     ///< step_ms without the two: triggers, waiting for data and for each other.
  std::string error{};    ///< Empty when ok. First cause first: rank, phase, signal or exit code, what().
  std::string
      error_type{};  ///< Type of the exception behind it (`ModelError`, `DataError`, ...); empty if none.
  int rank = -1;     ///< The runner at fault, -1 if none.
  std::uint32_t participants = 0;  ///< Runners that took part; 0 when not counted.
  std::uint32_t tries = 0;         ///< Attempts that were opened for this step: 1 if nothing went wrong.
  std::uint32_t skipped = 0;  ///< Of them, those whose batches were left out (`on_nonfinite: skip_batch`).
  std::vector<FailureCause>
      causes{};  ///< Losses behind a runner_lost or manager_lost, first cause first, at most 3.

  explicit operator bool() const noexcept { return status == StepStatus::ok; }
};

}  // namespace accelmgr
