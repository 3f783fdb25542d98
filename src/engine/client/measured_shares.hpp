// How many micro-batches of a step each runner should compute, from how fast the runners are.
#pragma once

#include <array>
#include <cstdint>

#include "engine/session/layout.hpp"

namespace accelmgr::client {

/// Nanoseconds that each rank takes for a micro-batch; 0: not known.
using MicroBatchTimes = std::array<std::uint64_t, session::max_ranks>;

/// The compute time of the slowest rank.
std::uint64_t compute_ns(const session::Shares& shares, session::RankMask team, const MicroBatchTimes& times);

/// Divides `total` micro-batches over the ranks of `team` so that the last one ends as early as possible.
/// Each rank gets at least one, so there must be as many as ranks; ranks beside the team get none. The times
/// of the team must be known.
session::Shares best_shares(session::RankMask team, std::uint64_t total, const MicroBatchTimes& times);

/// Decides between steps. After `window` committed steps with a team it takes the median time of each rank,
/// which a warm-up or a hiccup does not move, and forgets the measurements. It changes the shares only if the
/// step would compute at least `least_gain` times as fast:
///
///   - A change costs something: the queues are filled anew, and which rank computes what is no longer as it
///     was. A change that gains less than the jitter of most machines is not worth that.
///   - To undo a change, the speeds must move by `least_gain` in the other direction, measured from the new
///     shares: by a fifth in all. Jitter around a limit does not make the shares swing.
///   - At least `window` steps lie between two changes, whatever is measured.
///
/// A team begins with the best shares if the time of each rank is known from earlier steps, otherwise with
/// even ones. It is assigned to anew in any case.
class MeasuredShares {
 public:
  static constexpr int window = 5;
  static constexpr double least_gain = 1.1;

  /// `each`: the micro-batches of each rank if shares are even. A step has `each` micro-batches for each rank
  /// of the team, whatever the shares are.
  explicit MeasuredShares(int each) : each_(static_cast<std::uint64_t>(each)) {}

  /// The shares of the next step of that team.
  const session::Shares& shares_for(session::RankMask team);
  /// Notes what a committed step of the team of shares_for() took. A time of 0 says that the rank computed
  /// nothing: such a step is left out. Returns true when the shares have changed.
  bool note(const MicroBatchTimes& times);
  /// The medians that were taken last.
  const MicroBatchTimes& times() const noexcept { return known_; }

 private:
  void take_medians();
  std::uint64_t total() const noexcept;

  std::uint64_t each_;
  session::RankMask team_ = 0;
  session::Shares shares_{};
  MicroBatchTimes known_{};
  std::array<MicroBatchTimes, window> noted_{};
  int steps_ = 0;  ///< How many are noted.
};

}  // namespace accelmgr::client
