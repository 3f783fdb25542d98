// The slice-parallel reduction of a committed attempt: slabs of all participants into the master gradients,
// in fixed order of ranks, in one pass; recoverable at any instruction.
//
// Overwriting is idempotent. Accumulating is made so chunk by chunk: the chunk is copied to the rank's undo
// image, the cursor says `in flight`, the chunk is reduced, the cursor moves on. Whoever takes over a slice
// puts an in-flight image back first. (Stores of a killed process become visible in program order, which x86
// guarantees; non-temporal ones are fenced before the cursor moves.)
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "session/attempt.hpp"
#include "session/kernels_table.hpp"
#include "session/manifest.hpp"
#include "session/session.hpp"

namespace accelmgr::session {

/// One per process; any process that maps the session can finish any slice. Used by one thread.
class Reduction {
 public:
  Reduction(const Session& session, const Manifest& manifest);

  /// Runner: "not begun" for `attempt`. Before its vote.
  void reset_cursor(int rank, std::uint64_t attempt) const noexcept;

  /// Reduces the slice of `rank` from where its cursor stands to its end. Only its owner may call it, or
  /// anyone once the owner is known to be dead. The attempt must be committed. Does not block.
  void finish_slice(int rank, std::uint64_t attempt) const noexcept;

 private:
  /// A range of master elements that the same participants' slabs contribute to.
  struct Run {
    std::uint64_t end;  ///< In elements; begins where the one before ends.
    RankMask present;
  };
  /// Where the slabs of `present` hold element `first`.
  struct Slabs {
    std::array<const void*, max_ranks> begin;
    std::size_t count = 0;
    std::span<const void* const> span() const noexcept { return {begin.data(), count}; }
  };
  Slabs slabs_at(std::uint64_t first, RankMask present) const noexcept;
  std::vector<Run> runs_of(std::uint64_t first, std::uint64_t last, std::uint64_t attempt,
                           RankMask participants) const;
  void reduce(std::uint64_t first, std::uint64_t last, const std::vector<Run>& runs, std::size_t& run,
              double scale, SumInto into) const noexcept;
  void publish_copies(const Request& request) const noexcept;

  struct Extent {
    std::uint64_t first;
    std::uint64_t end;  ///< Where the next tensor begins.
    std::uint64_t tensor;
  };
  const Session* session_;
  std::vector<Extent> extents_;  ///< In order of `first`.
  std::vector<BufferEntry> buffers_;
};

}  // namespace accelmgr::session
