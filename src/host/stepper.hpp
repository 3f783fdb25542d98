// The host's side of a step: opens attempts, waits for their ends whatever happens, repeats what the
// configuration wants repeated, and says what became of it.
#pragma once

#include <array>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/manager.hpp"
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

  /// Returns by `timeout_s`. Throws UsageError when parameters are being written, and what
  /// `options.interrupted` throws.
  StepResult step(const StepOptions& options, double timeout_s);

  /// Blocks until the team that the supervisor wants is ready for an attempt, or patience is at its end.
  struct Outcome {
    StepStatus status = StepStatus::ok;
    std::string error{};
    int rank = -1;
    std::string error_type{};
  };
  /// How long to wait, and who may end it sooner.
  struct Patience {
    base::Deadline deadline;
    double timeout_s;
    const std::function<bool()>& interrupted;
    /// What `interrupted` throws ends patience: it is kept until nothing is left half done.
    mutable std::exception_ptr thrown{};
    bool over() const;
    std::string bound() const;  ///< "within 5 s", "before it was interrupted"
  };
  Outcome assemble(const Patience& patience);

  /// Whether the manager is gone. Then nothing is left of its processes, nor of an attempt.
  bool manager_is_lost();
  /// There is a new one.
  void manager_recovered() noexcept { manager_loss_.reset(); }

 private:
  enum class Purpose { compute, skip };
  /// Since when each rank was seen in its phase.
  struct Standing {
    session::Phase phase = session::Phase::none;
    std::int64_t since_ns = 0;
  };
  using Standings = std::array<Standing, session::max_ranks>;
  void look(Standings& standings) const noexcept;
  std::uint64_t elements_dealt() const noexcept;
  Outcome attempt(Purpose purpose, bool accumulate, const Patience& patience, StepResult& result);
  bool team_ready(session::RankMask team);
  bool dealt_to(session::RankMask team) const noexcept;
  int lost_rank() const noexcept;
  Outcome lost() const;
  Outcome wait(std::uint64_t attempt, const Patience& patience);
  Outcome why_aborted(std::uint32_t author) const;
  Outcome manager_lost(std::uint64_t attempt);
  std::string phases(session::RankMask ranks, const Standings* standings = nullptr) const;
  std::vector<FailureCause> causes() const;
  void fill(StepResult& result) const;

  const Config& config_;
  const session::Session& session_;
  session::Reduction reduction_;
  Processes& processes_;
  session::RankMask participants_ = 0;  ///< Of the attempt that assemble() prepared.
  int nonfinite_in_a_row_ = 0;
  std::optional<FailureCause> manager_loss_;
};

}  // namespace accelmgr::host
