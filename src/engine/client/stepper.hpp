// The host's side of a step: opens attempts, repeats them as the configuration says, and returns the result.
// Assembly brings the team together, AttemptWait waits for an attempt's end, LostManager does without a
// manager.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/step_result.hpp"
#include "base/patience.hpp"
#include "engine/client/assembly.hpp"
#include "engine/client/attempt_wait.hpp"
#include "engine/client/link.hpp"
#include "engine/client/loss_scaler.hpp"
#include "engine/client/lost_manager.hpp"
#include "engine/client/outcome.hpp"
#include "engine/client/step_kind.hpp"
#include "engine/client/touched_gradients.hpp"
#include "engine/session/parameter_update.hpp"
#include "engine/session/session.hpp"
#include "engine/session/spans.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::client {

/// Used by one thread at a time.
class Stepper {
 public:
  Stepper(const Config& config, const session::HostView& view, const session::Manifest& manifest, Link& link,
          LostManager::EndProcesses end_processes);

  /// Blocks for at most `timeout_s`, or longer to finish a committed attempt or to end what is left of a lost
  /// manager. Throws UsageError when parameters are written meanwhile, SessionError (see ServiceStalled), and
  /// what base::interrupted() throws.
  /// update: the session makes it in the last of the `divisor` steps whose gradients are added up.
  /// Requires: the moments of `update` have memory.
  StepResult step(const StepOptions& chosen, double timeout_s, StepKind kind = StepKind::outer,
                  const session::Update* update = nullptr);

  void zero_gradients();
  Touched& touched() noexcept { return touched_; }

  /// Blocks until the team is ready for an attempt and elements are assigned to it, or until patience is
  /// over.
  Outcome assemble(const base::Patience& patience) { return assembly_.assemble(patience, /*repeat=*/false); }
  /// The replica of the rank makes the call that was left for it, in an attempt in which nothing else
  /// happens. Blocks for at most `timeout_s`. Throws UsageError if the team has no such rank.
  Outcome call(int rank, double timeout_s);

  LostManager& lost_manager() noexcept { return lost_manager_; }

 private:
  std::uint64_t step_under_way() const noexcept;
  void check_repeatable() const;
  void refuse_without_weight(StepResult& result) const;
  session::Shares last_shares() const noexcept;
  enum class Purpose { compute, compute_and_apply, skip, call };
  Outcome attempt(Purpose purpose, const StepOptions& options, const base::Patience& patience,
                  StepResult& result, int calling_rank = -1);
  const session::LossScale& committed_loss_scale() const noexcept;

  const Config& config_;
  session::HostView view_;
  const session::Session& session_;
  const session::Manifest& manifest_;
  session::SpanWriter spans_;
  LostManager lost_manager_;
  Assembly assembly_;
  AttemptWait wait_;
  LossScaler loss_scaler_;
  Touched touched_;
  std::optional<session::Update> asked_update_;  ///< The update that the last step() makes in the session.
  int nonfinite_in_a_row_ = 0;
};

}  // namespace accelmgr::client
