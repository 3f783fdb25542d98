// Which element goes to which rank. Pure functions, so that loader, layout and tests cannot disagree.
//
// A sharding (session::Sharding) goes from a first element on to a team of ranks, step by step. A step is
// dealt in rounds: round m fills one batch of every rank that computes more than m micro-batches in a step.
// The elements of a round go to these ranks in turn, in ascending order. With even shares each round is for
// the whole team, so element i of the sharding goes to rank number i mod n.
//
// So the elements of a step are the next ones of the source, whatever the shares are: what committed steps
// have consumed is always a prefix of the source, and the data cursor is one number.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <span>

#include "engine/session/layout.hpp"

namespace accelmgr::data {

/// Where an element of a sharding lies.
struct Place {
  int rank;
  std::uint64_t batch;     ///< Counted from the rank's first batch of this sharding.
  std::uint64_t position;  ///< In the batch.
  bool operator==(const Place&) const = default;
};

constexpr std::uint64_t size_of(session::RankMask team) {
  return static_cast<std::uint64_t>(std::popcount(team));
}

/// Rank number `number`, counted from 0, of `team`.
constexpr int rank_of(std::uint64_t number, session::RankMask team) {
  for (; number > 0; --number) team &= team - 1;
  return std::countr_zero(team);
}

/// The places of the elements of a sharding. Elements are counted from its first one.
class RoundRobin {
 public:
  RoundRobin() = default;
  /// Requires: the team has a rank, and each of its ranks computes at least one micro-batch in a step.
  RoundRobin(const session::Assignment& to, std::uint64_t batch_size);

  Place place_of(std::uint64_t index) const noexcept;
  /// The element at a place of the team.
  std::uint64_t index_of(const Place& place) const noexcept;
  /// Whether that element is the first of a round.
  bool begins_round(const Place& place) const noexcept;
  /// Elements of a full step.
  std::uint64_t step_elements() const noexcept { return step_elements_; }
  /// Whether all ranks compute the same number of micro-batches.
  bool even() const noexcept { return kinds_of_rounds_ == 1; }

  /// The first element that is missing when the ranks of the team, in ascending order, hold their first
  /// `rows[i]` elements each.
  std::uint64_t first_missing(std::span<const std::uint64_t> rows) const noexcept;
  /// One past the last element that is present.
  std::uint64_t end_of(std::span<const std::uint64_t> rows) const noexcept;

 private:
  /// Consecutive rounds of a step that are for the same ranks.
  struct Rounds {
    session::RankMask ranks;
    std::uint64_t first_round;
    std::uint64_t first_element;  ///< Counted from the step's first.
  };
  const Rounds& rounds_at(std::uint64_t element_of_step) const noexcept;
  const Rounds& rounds_of(std::uint64_t round) const noexcept;
  std::uint64_t index_of_row(int rank, std::uint64_t row) const noexcept;

  session::Assignment to_{};
  std::uint64_t batch_size_ = 1;
  std::uint64_t step_elements_ = 0;
  std::array<Rounds, session::max_ranks> all_rounds_{};
  std::size_t kinds_of_rounds_ = 0;
};

/// The most micro-batches that a rank can compute in a step when each of `ranks` computes one at least.
constexpr int largest_share(int ranks, int grad_accumulation_steps) {
  return ranks * grad_accumulation_steps - (ranks - 1);
}

/// Batches that are loaded ahead for a rank.
constexpr std::uint64_t batches_ahead(int prefetch, int batch_size_per_device) {
  const auto ahead = static_cast<std::uint64_t>(prefetch);
  const auto batch_size = static_cast<std::uint64_t>(batch_size_per_device);
  return (ahead + batch_size - 1) / batch_size;
}

/// Slots in the queue of a rank: for the current step, which releases its slots only at its commit; for the
/// last step if it is kept; and for `prefetch` elements on top. `micro_batches` is the most that a rank can
/// have in a step.
constexpr std::uint64_t batch_slots(int micro_batches, int prefetch, int batch_size_per_device,
                                    bool keeps_last_step = false) {
  return static_cast<std::uint64_t>(micro_batches) * (keeps_last_step ? 2 : 1) +
         batches_ahead(prefetch, batch_size_per_device);
}

}  // namespace accelmgr::data
