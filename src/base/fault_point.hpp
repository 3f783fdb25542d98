// Places where a test can break things on purpose. In a build without tests they are nothing at all; in one
// with tests each is a look at a pointer, until the library of tests/faults installs a handler.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"

namespace accelmgr::base {

enum class FaultPhase {
  init,             ///< Runner: before its model is built.
  load_parameters,  ///< Runner: triggered, before it reads the parameters' version.
  data,             ///< Runner: before it waits for a batch. Manager: before the source is read.
  forward,
  backward,
  take_over,   ///< Runner: a gradient is in the slab, its tag not yet.
  vote,        ///< Runner: its copies are written, its bit is not set.
  voted,       ///< Runner: its bit is set.
  undo_saved,  ///< Reduction: the chunk's undo image is saved, the cursor not yet in flight.
  in_flight,   ///< Reduction: the cursor says in flight, the chunk is not reduced.
  reduced,     ///< Reduction: the chunk is reduced, the cursor still in flight.
  chunk,       ///< Reduction: between two chunks.
  publish,     ///< Reduction: all chunks are done, the result's copies are not written.
  published,   ///< Reduction: they are, the cursor is not yet at its end.
  close,       ///< Runner: its slice is finished, the attempt perhaps not yet closed.
  checkpoint,  ///< Manager: after each file of a checkpoint, and before its rename.
};

/// What the caller of a fault point is to do. nan, of `forward`: its loss becomes NaN.
enum class FaultEffect { none, nan };

#ifdef ACCELMGR_FAULTS

/// What is to happen where. `arm` takes Config::faults in a process that begins (`rank` -1: the manager);
/// throws ConfigError. `reach` is called at every fault point, in any thread; it may not return.
struct FaultHandler {
  void (*arm)(const std::vector<std::string>& faults, int rank, std::uint32_t generation);
  FaultEffect (*reach)(FaultPhase phase);
};
inline std::atomic<const FaultHandler*> fault_handler{nullptr};

inline FaultEffect fault_point(FaultPhase phase) {
  const auto* handler = fault_handler.load(std::memory_order_relaxed);
  return handler == nullptr ? FaultEffect::none : handler->reach(phase);
}

/// In a process that begins, before it has threads: what `faults` say of it will happen in it. `rank` is -1
/// in the manager. Without faults it forgets those that its parent had. Throws ConfigError: a fault that
/// cannot be read, or a program that cannot inject any.
inline void arm_faults(const std::vector<std::string>& faults, int rank, std::uint32_t generation) {
  if (const auto* handler = fault_handler.load())
    handler->arm(faults, rank, generation);
  else if (!faults.empty())
    throw ConfigError("faults is set, but this program cannot inject any; it must link accelmgr_faults",
                      "faults");
}

#else

constexpr FaultEffect fault_point(FaultPhase) noexcept { return FaultEffect::none; }

#endif

}  // namespace accelmgr::base
