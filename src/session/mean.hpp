// How the losses of micro-batches become one mean: pure functions, computed alike by whoever finishes a
// slice.
#pragma once

#include <cstdint>

#include "session/layout.hpp"
#include "session/step_word.hpp"

namespace accelmgr::session {

/// What participants' ballots add up to.
struct Tally {
  double loss = 0;  ///< Weighed sum; times scale(), the mean loss.
  std::uint64_t samples = 0;
  std::uint64_t elements = 0;
  std::uint64_t micro_batches = 0;
  bool nonfinite = false;
};

/// A full micro-batch's loss is divided by (micro_batches x participants), as in the reference; under
/// `loss_scaling: samples` a partial one weighs samples / batch_size of that. This is what a short step's sum
/// is multiplied with to be a mean again: 1 when nothing was missing.
inline double mean_scale(const Request& request, const Tally& tally) {
  const auto full = std::uint64_t{request.micro_batches} *
                    static_cast<std::uint64_t>(__builtin_popcount(request.participants));
  if (request.by_samples) {
    const auto full_samples = full * request.batch_size;
    return tally.samples == 0 || tally.samples == full_samples ? 1.0
                                                               : double(full_samples) / double(tally.samples);
  }
  return tally.micro_batches == 0 || tally.micro_batches == full ? 1.0
                                                                 : double(full) / double(tally.micro_batches);
}

/// The chunks [begin, end) of participant `position` of `participants`.
struct ChunkRange {
  std::uint64_t begin;
  std::uint64_t end;
};
inline ChunkRange slice(std::uint64_t chunks, int position, int participants) {
  const auto p = static_cast<std::uint64_t>(position), n = static_cast<std::uint64_t>(participants);
  return {chunks * p / n, chunks * (p + 1) / n};
}

}  // namespace accelmgr::session
