// What both kinds of torture have in common: the training, its undisturbed course, and what a log tells.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "engine/client/handle.hpp"
#include "killer.hpp"
#include "support.hpp"

namespace accelmgr::test {

/// The registered name of the model and of the source.
inline constexpr const char* tortured = "tortured";

/// The option of the source with which it makes children that live on, also in the middle of the run.
inline constexpr const char* has_children = "has_children";

inline constexpr int tortured_ranks = 3;
inline constexpr int tortured_batch_size = 3, tortured_accumulation_steps = 2;
inline constexpr int elements_per_step = tortured_ranks * tortured_batch_size * tortured_accumulation_steps;
/// Steps are made in blocks of so many; each block ends with an update of the parameters.
inline constexpr std::uint64_t steps_per_update = 4;

/// Every loss is repaired, for ever and at once.
Config tortured_config(std::uint64_t seed);

/// Faults that kill runners in `steps` steps: about `expected` times, as often in each phase.
std::vector<std::string> runner_faults(std::uint64_t seed, std::uint64_t steps, double expected);

/// The state that must be the same in both runs.
struct State {
  std::size_t parameters = 0, gradients = 0, buffers = 0;  ///< Hashes of all bytes.
  std::uint64_t steps = 0, samples = 0, elements = 0;
};
std::size_t hash_of(const Tensors& tensors);
State state_of(const client::Handle& manager);
/// What differs, as text; empty if nothing does.
std::string difference(const State& is, const State& expected);
/// All tensors.
Tensors end_of(const client::Handle& manager);

// The schedule. Steps are counted from 0 here. The first block of steps accumulates onto zeroed gradients;
// the first step of the second block overwrites them; and so on in turn.

constexpr bool is_first_of_block(std::uint64_t step) { return step % steps_per_update == 0; }
constexpr bool is_last_of_block(std::uint64_t step) { return is_first_of_block(step + 1); }
constexpr bool is_zeroed_before(std::uint64_t step) {
  return is_first_of_block(step) && step / steps_per_update % 2 == 0;
}
constexpr bool is_accumulated(std::uint64_t step) {
  return !is_first_of_block(step) || is_zeroed_before(step);
}
/// The parameters that the update at the end of a block writes.
Tensors updated(const client::Handle& manager);

/// The undisturbed course.
struct Course {
  State begin;                ///< Before the first step, with zeroed gradients.
  std::vector<State> states;  ///< After every step, and after the update that follows it.
  /// The parameters of each block, and those after the last one; the gradients at the end of each block.
  std::vector<Tensors> parameters, gradients;
  Tensors end;  ///< All tensors after the last step.

  const State& after(std::uint64_t steps) const { return steps == 0 ? begin : states.at(steps - 1); }
};
/// `keep_blocks`: also `parameters` and `gradients`.
Course undisturbed_course(const Config& config, std::uint64_t steps, bool keep_blocks);

/// All but stops.
int number_of(const Kills& kills);

/// What both kinds report of a round.
struct RoundReport {
  std::uint64_t steps = 0;  ///< Committed steps that the disturbed run has come to.
  Kills killed;             ///< Kills by the killer process.
  Kills injected;           ///< Kills by the fault library: "forward", "manager in_flight", ...
  std::uint64_t losses = 0;
  double undisturbed_s = 0, disturbed_s = 0;
  /// What differs from the undisturbed run and after which step, or an error, or what is left behind. Empty
  /// if the run is good.
  std::string failure;
};

/// Makes an undisturbed run, then the disturbed one, whose processes log to the file. It is removed if
/// nothing failed.
void make_round(RoundReport& report, const std::string& log_file, const std::function<Course()>& undisturbed,
                const std::function<void(const Course& expected)>& disturb);

}  // namespace accelmgr::test
