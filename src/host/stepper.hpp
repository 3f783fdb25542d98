// The host's side of a step: opens the attempt, waits for its end whatever happens, and says what became of
// it.
#pragma once

#include "accelmgr/config.hpp"
#include "accelmgr/step_result.hpp"
#include "base/clock.hpp"
#include "host/processes.hpp"
#include "session/reduction.hpp"
#include "session/session.hpp"

namespace accelmgr::host {

/// Used by one thread at a time.
class Stepper {
 public:
  Stepper(const Config& config, const session::Session& session, const session::Manifest& manifest,
          Processes& processes);

  /// Returns by `timeout_s` (and `abort_grace` when runners must be ended first). Throws UsageError when
  /// parameters are being written.
  StepResult step(double timeout_s, bool accumulate, bool parameters_changed);

 private:
  struct Outcome {
    StepStatus status = StepStatus::ok;
    std::string error{};
    int rank = -1;
    std::string error_type{};
  };
  bool settled(std::uint64_t attempt, base::Deadline deadline);
  int lost_rank() const noexcept;
  Outcome lost(int rank) const;
  Outcome wait(std::uint64_t attempt, base::Deadline deadline, double timeout_s);
  Outcome why_aborted(std::uint32_t author) const;
  Outcome manager_lost(std::uint64_t attempt);
  std::string phases() const;
  void fill(StepResult& result) const;

  const Config& config_;
  const session::Session& session_;
  session::Reduction reduction_;
  Processes& processes_;
  session::RankMask participants_;
  int spin_us_;
  std::int64_t aborted_ns_ = 0;  ///< When the last attempt was found aborted; 0: it was not.
  std::string manager_exit_;     ///< How the manager ended, once it is lost.
};

}  // namespace accelmgr::host
