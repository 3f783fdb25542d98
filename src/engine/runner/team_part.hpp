// A runner's membership in teams of devices: says whether its device can be in one, and follows the request
// of each attempt (engine/session/device_team.hpp). A rank that cannot join refuses the attempt, but lives
// on; the host has the next attempt reduced through the session.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "accelmgr/config.hpp"
#include "engine/replica/replica.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::runner {

/// Used by one thread.
class TeamPart {
 public:
  /// The replica is bound, and outlives this. Logs why its device can be in no team.
  TeamPart(const Config& config, const session::RunnerView& runner, replica::Replica& replica,
           base::Waiter& waiter);

  /// Joins the team of the attempt, stays in it or leaves, as the request says. Call it before the replica
  /// begins the attempt. Returns true if the device left or joined a team: it may not have the parameters.
  /// Throws AttemptRefused, and what the device reports if it has failed.
  [[nodiscard]] bool follow(std::uint64_t attempt);
  /// The replica has done everything that its team does in this attempt.
  void done() noexcept { under_way_ = false; }
  /// The attempt has ended without a commit. Leaves the team if it has begun what the others may not have
  /// done. Returns true then. Throws if the device has failed.
  [[nodiscard]] bool abandon();
  bool in_team() const noexcept { return team_ != 0; }
  /// The other members of the team that the supervisor has found to be lost since the attempt began.
  session::RankMask lost_members() const;
  /// Why the team has failed in this attempt, as the replica's exception says. Empty: it has not.
  std::string failure() const { return under_way_ ? member_->failure() : std::string(); }

 private:
  std::string why_in_none(const Config& config, replica::Replica& replica);
  void note_members(session::RankMask ranks);
  void join(std::uint64_t attempt, session::RankMask ranks);
  session::TeamId id_of(std::uint64_t attempt, int lowest);
  bool leave();

  session::RunnerView view_;
  session::TeamRecord& record_;
  base::Waiter& waiter_;
  double timeout_s_;  ///< For joining a team.
  replica::TeamMember* member_ = nullptr;
  session::RankMask team_ = 0;  ///< The team of this attempt; 0 if this rank is in none.
  std::array<std::uint32_t, session::max_ranks> generations_{};  ///< Of its members.
  bool under_way_ = false;  ///< The device works with its team, or may have begun to.
};

}  // namespace accelmgr::runner
