// The host's side of a step: opens attempts, waits for their ends, repeats them as the configuration says,
// and returns the result.
#pragma once

#include <array>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/step_result.hpp"
#include "base/patience.hpp"
#include "engine/client/link.hpp"
#include "engine/client/loss_scaler.hpp"
#include "engine/client/measured_shares.hpp"
#include "engine/client/next_action.hpp"
#include "engine/client/stall_timer.hpp"
#include "engine/client/step_kind.hpp"
#include "engine/client/step_report.hpp"
#include "engine/client/touched_gradients.hpp"
#include "engine/session/parameter_update.hpp"
#include "engine/session/reduction.hpp"
#include "engine/session/session.hpp"
#include "engine/session/spans.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::client {

/// What earlier hosts have left in the master's gradients.
LeftGradients left_in(const session::Session& session);

/// A service does not move, and this host must leave it: nobody may finish what a process that lives may
/// finish, too.
class ServiceStands : public SessionError {
 public:
  using SessionError::SessionError;
};

/// Used by one thread at a time.
class Stepper {
 public:
  /// Ends what is left of the processes of a manager that is gone. Blocks while they end. Returns how the
  /// manager ended, as text.
  using EndProcesses = std::function<std::string()>;
  Stepper(const Config& config, const session::HostView& view, const session::Manifest& manifest, Link& link,
          EndProcesses end_processes);

  /// Blocks for at most `timeout_s`, or longer to finish a committed attempt or to end what is left of a lost
  /// manager. Throws UsageError when parameters are written meanwhile, SessionError (see ServiceStands), and
  /// what `options.interrupted` throws.
  /// update: the session makes it, as a part of the step, if this is the last of the `divisor` steps whose
  /// gradients are added. Its moments have memory.
  StepResult step(const StepOptions& chosen, double timeout_s, StepKind kind = StepKind::outer,
                  const session::Update* update = nullptr);

  void zero_gradients();
  Touched& touched() noexcept { return touched_; }

  /// What became of an attempt, or of waiting for one to begin.
  struct Outcome {
    StepStatus status = StepStatus::ok;
    std::string error{};
    int rank = -1;
    std::string error_type{};
    bool overflow = false;     ///< nonfinite: half the loss scale may do.
    bool team_failed = false;  ///< runner_lost: the team of devices, and no runner.
  };
  /// Blocks until the team is ready for an attempt and elements are assigned to it, or until patience is
  /// over. repeat: for the last step again, which the same team must make.
  Outcome assemble(const base::Patience& patience, bool repeat = false);
  /// The replica of the rank makes the call that was left for it, in an attempt in which nothing else
  /// happens. Blocks for at most `timeout_s`. Throws UsageError if the team has no such rank.
  Outcome call(int rank, double timeout_s);

  /// Whether the manager is gone. If so, its processes have been ended, and an attempt under way has been
  /// aborted or finished. Blocks while they end.
  bool manager_is_lost();
  /// Tells the stepper that there is a new manager.
  void manager_recovered() noexcept { manager_loss_.reset(); }

 private:
  /// What wait() remembers from one look to the next.
  struct Wait {
    const base::Patience& patience;
    StallTimer stall_timer{};
    Standings standings{};
    bool parked = false;
  };
  std::uint64_t step_under_way() const noexcept;
  void check_repeatable() const;
  void refuse_without_weight(StepResult& result) const;
  session::Shares last_shares() const noexcept;
  enum class Purpose { compute, compute_and_apply, skip, call };
  Outcome attempt(Purpose purpose, const StepOptions& options, const base::Patience& patience,
                  StepResult& result, int calling_rank = -1);
  const session::LossScale& committed_loss_scale() const noexcept;
  /// The generation of each rank of a team of devices; 0: it is not in it.
  using Members = std::array<std::uint32_t, session::max_ranks>;
  Members members_of(session::RankMask ranks) const noexcept;
  Outcome look_for_newcomer() const;
  session::DeviceTeam device_team() noexcept;
  void team_failed(const Outcome& outcome);
  bool team_ready(session::RankMask team);
  bool loader_follows() const noexcept;
  bool service_closes() const;
  const session::Shares& shares_for(session::RankMask team);
  void measure();
  Outcome lost() const;
  Outcome wait(std::uint64_t attempt, const base::Patience& patience);
  Observed observe(const session::StepWord& word, Wait& wait);
  bool participant_ended() const noexcept;
  /// Returns StepResult::grad_norm.
  double wait_applied(std::uint64_t attempt, const base::Patience& patience);
  Outcome why_aborted(std::uint32_t author) const;
  Outcome manager_lost(std::uint64_t attempt);

  const Config& config_;
  session::HostView view_;
  const session::Session& session_;
  const session::Manifest& manifest_;
  session::SpanWriter spans_;
  session::Reduction reduction_;
  session::ParameterUpdate update_;
  std::optional<session::Update> asked_update_;  ///< The update that the last step() makes in the session.
  Link& link_;
  EndProcesses end_processes_;
  LossScaler loss_scaler_;
  Touched touched_;
  session::RankMask participants_ = 0;  ///< Ranks of the attempt that assemble() prepared.
  session::Shares even_shares_;
  std::optional<MeasuredShares> measured_shares_;
  int nonfinite_in_a_row_ = 0;
  Members team_members_{};   ///< The members of the attempt's team.
  Members failed_team_{};    ///< The members of the last team that failed.
  Members inner_members_{};  ///< The runners of the last inner step.
  std::optional<Failure> manager_loss_;
};

}  // namespace accelmgr::client
