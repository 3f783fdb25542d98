// What is to be broken on purpose, and when: one text of Config::faults is one fault.
//
//   rank=1 step=3 phase=forward fault=kill
//   rank=any generation=any phase=any probability=0.001 seed=7 fault=kill
//
//   rank         a number, `manager`, or `any` (any rank; not the manager)
//   phase        a name of base::FaultPhase, or `any`
//   fault        kill, stop: SIGKILL, SIGSTOP to the process
//                exit:CODE: _exit(CODE)
//                exception[:TEXT]: std::runtime_error is thrown; TEXT has no space. In the reduction, which
//                is noexcept, that is std::terminate()
//                hang: the thread blocks for ever, without using the CPU and without taking signals
//                nan: the loss becomes NaN. Its phase is forward; `any` means that
//                slow:MILLISECONDS: the thread sleeps that long
//   step         as the log counts them, from 1; or `any`, the default, which takes in what is before the
//                first
//   occurrence   the n-th time that this process reaches the phase in that step, from 1, the default; it
//                goes on counting when the step is repeated. In the manager, which does not work along the
//                steps: in all steps together, unless one is named
//   generation   of the process: a number, from 1 (the manager: from 0), or `any`; by default the first
//                alone, so that a replacement is spared
//   probability  instead of an occurrence: at every reach of the phase, with this probability; the draws
//                depend on seed, rank and generation alone
//   seed         of those draws; faults of the same seed are drawn alike
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/fault_point.hpp"
#include "data/random.hpp"

namespace accelmgr::faults {

/// Empty for what is no phase. Without a default case: the compiler reports an enumerator that is missing.
constexpr std::string_view name_of(base::FaultPhase phase) {
  using enum base::FaultPhase;
  switch (phase) {
    case init:
      return "init";
    case load_parameters:
      return "load_parameters";
    case data:
      return "data";
    case forward:
      return "forward";
    case backward:
      return "backward";
    case take_over:
      return "take_over";
    case vote:
      return "vote";
    case voted:
      return "voted";
    case undo_saved:
      return "undo_saved";
    case in_flight:
      return "in_flight";
    case reduced:
      return "reduced";
    case chunk:
      return "chunk";
    case publish:
      return "publish";
    case published:
      return "published";
    case close:
      return "close";
    case checkpoint:
      return "checkpoint";
  }
  return "";
}

/// All of them, in order.
inline constexpr auto phases = [] {
  constexpr auto count = [] {
    std::size_t i = 0;
    while (!name_of(static_cast<base::FaultPhase>(i)).empty()) ++i;
    return i;
  }();
  std::array<base::FaultPhase, count> all{};
  for (std::size_t i = 0; i < count; ++i) all[i] = static_cast<base::FaultPhase>(i);
  return all;
}();

enum class Action { kill, stop, exit, exception, hang, nan, slow };

inline constexpr int manager_rank = -1;

/// What is optional means `any` when it is empty.
struct Fault {
  std::string text;  ///< As it was written.
  std::optional<int> rank;
  std::optional<std::uint64_t> step;
  std::optional<base::FaultPhase> phase;
  std::uint64_t occurrence = 1;
  std::optional<std::uint32_t> generation;
  std::optional<double> probability;  ///< Empty: it is not random, `occurrence` counts.
  std::uint64_t seed = 0;
  Action action = Action::kill;
  int exit_code = 0;
  std::string message;  ///< Of the exception.
  std::chrono::milliseconds delay{0};
};

/// Throws ConfigError, with key `faults`.
Fault parse(const std::string& text);

/// The faults of one process, and how often it has been where they may strike. Thread-safe.
class Plan {
 public:
  /// Keeps of `faults` those that concern the process.
  Plan(std::vector<Fault> faults, int rank, std::uint32_t generation);

  bool empty() const noexcept { return watched_.empty(); }

  /// Counts that the process has reached `phase` in `step`; returns what is to happen there, in the order of
  /// the configuration.
  std::vector<const Fault*> reach(base::FaultPhase phase, std::uint64_t step);

 private:
  struct Watched {
    Fault fault;
    data::Random random;
    std::uint64_t step = 0;     ///< In which it has been reached ...
    std::uint64_t reached = 0;  ///< ... so many times.
    bool is_due(base::FaultPhase phase, std::uint64_t step);
  };
  std::mutex mutex_;
  std::vector<Watched> watched_;  ///< Does not change in length.
};

}  // namespace accelmgr::faults
