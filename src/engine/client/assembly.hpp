// Brings the session to where an attempt can open, and knows who takes part in it: the ranks of the team, the
// share of each, and which of them sum up their gradients among their devices.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "accelmgr/config.hpp"
#include "base/patience.hpp"
#include "engine/client/link.hpp"
#include "engine/client/lost_manager.hpp"
#include "engine/client/measured_shares.hpp"
#include "engine/client/outcome.hpp"
#include "engine/session/session.hpp"
#include "engine/session/spans.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::client {

/// Used by one thread at a time.
class Assembly {
 public:
  Assembly(const Config& config, const session::HostView& view, Link& link, LostManager& lost_manager);

  /// Blocks until the team is ready for an attempt and elements are assigned to it, or until patience is
  /// over. repeat: the last step is made again, by the team that has made it. Throws SessionError when
  /// another host drives the session.
  Outcome assemble(const base::Patience& patience, bool repeat);
  /// The ranks of the attempt that was assembled.
  session::RankMask participants() const noexcept { return participants_; }
  /// Of an inner step: runner_lost if a runner has not made the one before.
  Outcome look_for_newcomer() const;
  /// An inner step was committed, and the participants have made it.
  void inner_step_made() noexcept { inner_members_ = members_of(participants_); }
  /// Takes in how long the micro-batches of a committed step have taken.
  void measure();

  /// The team of devices of the attempt: none if the last one of the same processes has failed.
  session::DeviceTeam device_team() noexcept;
  void device_team_failed(const Outcome& outcome);

 private:
  /// The generation of each rank of a team; 0: it is not in it.
  using Members = std::array<std::uint32_t, session::max_ranks>;
  Members members_of(session::RankMask ranks) const noexcept;
  bool team_ready(session::RankMask team);
  void check_lease() const;
  bool loader_follows() const noexcept;
  const session::Shares& shares_for(session::RankMask team);
  Outcome given_up() const;

  const Config& config_;
  session::HostView view_;
  const session::Session& session_;
  session::SpanWriter spans_;
  Link& link_;
  LostManager& lost_manager_;
  session::RankMask participants_ = 0;
  session::Shares even_shares_;
  std::optional<MeasuredShares> measured_shares_;
  Members device_team_members_{};  ///< The members of the attempt's team of devices.
  Members failed_device_team_{};   ///< The members of the last team of devices that failed.
  Members inner_members_{};        ///< The runners of the last inner step.
};

}  // namespace accelmgr::client
