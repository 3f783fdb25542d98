// Fault points: places where a test can break things on purpose. In a build without tests they compile to
// nothing. In a build with tests each reads a pointer, until the library of tests/engine/faults installs a
// handler.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"

namespace accelmgr::base {

enum class FaultPhase {
  init,             ///< Runner: before its model is built.
  load_parameters,  ///< Runner: in an attempt, before it reads the version of the parameters.
  data,             ///< Runner: before it waits for a batch. Manager: before the source is read.
  forward,
  backward,
  gradient_capture,  ///< Runner: a gradient is in the slab, its tag is not set.
  vote,              ///< Runner: its state copy and ballot are written, its bit is not set.
  voted,             ///< Runner: its bit is set.
  undo_saved,        ///< Reduction: the undo image is saved, the cursor is not yet in flight.
  in_flight,         ///< Reduction: the cursor is in flight, the chunk is not reduced.
  reduced,           ///< Reduction: the chunk is reduced, the cursor is still in flight.
  chunk,             ///< Reduction: between two chunks.
  update_saved,      ///< Update: a chunk's new values are in the image, the cursor is not yet in flight.
  update_in_flight,  ///< Update: the cursor is in flight, the chunk is not copied.
  updated,           ///< Update: the chunk is copied, the cursor is still in flight.
  publish,           ///< Reduction: all chunks are done, counters and result buffers are not written.
  published,         ///< Reduction: they are written, the cursor is not yet at its end.
  close,             ///< Runner: its slice is finished, the attempt may still be open.
  checkpoint,        ///< Manager: after each file of a checkpoint, and before its rename.
};

/// What the caller of a fault point must do. nan, only of `forward`: make the loss NaN.
enum class FaultEffect { none, nan };

#ifdef ACCELMGR_FAULTS

/// Decides what happens at fault points. `arm` gets Config::faults in a new process (`rank` is -1 in the
/// manager), and throws ConfigError. Every fault point calls `reach`, on any thread; it may not return.
struct FaultHandler {
  void (*arm)(const std::vector<std::string>& faults, int rank, std::uint32_t generation);
  FaultEffect (*reach)(FaultPhase phase);
};
inline std::atomic<const FaultHandler*> fault_handler{nullptr};

inline FaultEffect fault_point(FaultPhase phase) {
  const auto* handler = fault_handler.load(std::memory_order_relaxed);
  return handler == nullptr ? FaultEffect::none : handler->reach(phase);
}

/// Arms the faults of this process among `faults`, and disarms those that it inherited from its parent.
/// `rank` is -1 in the manager. Throws ConfigError when a fault cannot be read, or when the program cannot
/// inject any.
/// Requires: the process is new and has no threads yet.
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
