// The plan of faults that a test injects. Each text of Config::faults is one fault.
//
//   rank=1 step=3 phase=forward fault=kill
//   rank=any generation=any phase=any probability=0.001 seed=7 fault=kill
//
//   rank         a number, `manager`, or `any`: every rank, but not the manager
//   phase        a name of base::FaultPhase, or `any`
//   fault        kill, stop: send SIGKILL or SIGSTOP to the process
//                exit:CODE: call _exit(CODE)
//                exception[:TEXT]: throw std::runtime_error; TEXT has no space. The reduction is noexcept:
//                there the process ends in std::terminate()
//                hang: block the thread for ever. It uses no CPU time and takes no signals
//                nan: make the loss NaN. The phase must be forward or `any`, which then means forward
//                slow:MILLISECONDS: let the thread sleep that long
//   step         the step's number in the log, from 1; or `any`, the default, which includes the time
//                before the first step
//   occurrence   strike the n-th time that this process reaches the phase in a step; n counts from 1, the
//                default. A repeated step goes on with the same count. In the manager, which does not work
//                step by step, all steps share one count, unless `step` names one
//   generation   the generation of the process: a number from 1 (for the manager from 0), or `any`. The
//                default is the first generation, so a replacement is not struck
//   probability  instead of `occurrence`: strike at every reach of the phase with this probability. The
//                draws depend only on seed, rank and generation
//   seed         the seed of the draws; faults with the same seed draw the same numbers
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/fault_point.hpp"
#include "engine/data/random.hpp"

namespace accelmgr::faults {

/// In the order of base::FaultPhase.
inline constexpr std::string_view phase_names[] = {
    "init",    "load_parameters", "data",      "forward", "backward",  "gradient_capture", "vote",
    "voted",   "undo_saved",      "in_flight", "reduced", "chunk",     "update_saved",     "update_in_flight",
    "updated", "publish",         "published", "close",   "checkpoint"};
static_assert(std::size(phase_names) == static_cast<std::size_t>(base::FaultPhase::checkpoint) + 1);

constexpr std::string_view name_of(base::FaultPhase phase) {
  return phase_names[static_cast<std::size_t>(phase)];
}

/// All phases, in order.
inline constexpr auto phases = [] {
  std::array<base::FaultPhase, std::size(phase_names)> all{};
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<base::FaultPhase>(i);
  return all;
}();

enum class Action { kill, stop, exit, exception, hang, nan, slow };

inline constexpr int manager_rank = -1;

/// An empty std::optional means `any`.
struct Fault {
  std::string text;  ///< The fault as the user wrote it.
  std::optional<int> rank;
  std::optional<std::uint64_t> step;
  std::optional<base::FaultPhase> phase;
  std::uint64_t occurrence = 1;
  std::optional<std::uint32_t> generation;
  std::optional<double> probability;  ///< If empty, `occurrence` decides.
  std::uint64_t seed = 0;
  Action action = Action::kill;
  int exit_code = 0;
  std::string message;  ///< The text of the exception.
  std::chrono::milliseconds delay{0};
};

/// Throws ConfigError with the key `faults`.
Fault parse(const std::string& text);

/// The faults that concern one process, and a count of how often it reached their places. Thread-safe.
class Plan {
 public:
  /// Keeps only the faults that concern this process.
  Plan(std::vector<Fault> faults, int rank, std::uint32_t generation);

  bool empty() const noexcept { return watched_.empty(); }

  /// Counts that the process has reached `phase` in `step`. Returns the faults that strike there, in the
  /// order of the configuration.
  std::vector<const Fault*> reach(base::FaultPhase phase, std::uint64_t step);

 private:
  struct Watched {
    Fault fault;
    data::Random random;
    std::uint64_t step = 0;     ///< The last step in which the place was reached.
    std::uint64_t reached = 0;  ///< How often it was reached in that step.
    bool is_due(base::FaultPhase phase, std::uint64_t step);
  };
  std::mutex mutex_;
  std::vector<Watched> watched_;  ///< Its length never changes.
};

}  // namespace accelmgr::faults
