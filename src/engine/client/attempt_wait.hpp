// Waits for the end of an attempt, as next_action() says, and says what became of it.
#pragma once

#include <cstdint>

#include "accelmgr/config.hpp"
#include "accelmgr/errors.hpp"
#include "base/patience.hpp"
#include "engine/client/link.hpp"
#include "engine/client/lost_manager.hpp"
#include "engine/client/next_action.hpp"
#include "engine/client/outcome.hpp"
#include "engine/client/stall_timer.hpp"
#include "engine/client/step_report.hpp"
#include "engine/session/session.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::client {

/// The service stands still, so this host leaves the session. The host must not finish the attempt itself:
/// the service still lives, and may finish it, too.
class ServiceStalled : public SessionError {
 public:
  using SessionError::SessionError;
};

/// Used by one thread at a time.
class AttemptWait {
 public:
  AttemptWait(const Config& config, const session::HostView& view, Link& link, LostManager& lost_manager)
      : config_(config), view_(view), session_(view.session()), link_(link), lost_manager_(lost_manager) {}

  /// Blocks until the attempt is over. Throws ServiceStalled, UsageError when parameters were written
  /// meanwhile, SessionError as LostManager::end().
  Outcome until_over(std::uint64_t attempt, session::RankMask participants, const base::Patience& patience);
  /// Blocks until the replicas have applied the gradients of a committed attempt. Returns
  /// StepResult::grad_norm.
  double until_applied(std::uint64_t attempt, session::RankMask participants, const base::Patience& patience);

 private:
  /// What until_over() remembers from one look to the next.
  struct Wait {
    session::RankMask participants;
    const base::Patience& patience;
    StallTimer stall_timer{};
    Standings standings{};
    bool parked = false;
  };
  Observed observe(const session::StepWord& word, Wait& wait);
  bool participant_ended(session::RankMask participants) const noexcept;
  Outcome why_aborted(std::uint32_t author) const;

  const Config& config_;
  session::HostView view_;
  const session::Session& session_;
  Link& link_;
  LostManager& lost_manager_;
};

}  // namespace accelmgr::client
