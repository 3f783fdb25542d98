// How the losses of micro-batches become their average. These are pure functions, so every process that
// finishes a slice computes the same values.
#pragma once

#include <cstdint>

#include "engine/session/layout.hpp"
#include "engine/session/step_word.hpp"

namespace accelmgr::session {

/// The sum of the participants' ballots.
struct Tally {
  double loss = 0;  ///< Weighted sum; times mean_scale(), the mean loss.
  std::uint64_t samples = 0;
  std::uint64_t elements = 0;
  std::uint64_t micro_batches = 0;
  bool nonfinite = false;
};

/// The factor that makes the sum of a step's losses or gradients their mean; 1 for a full step. Runners
/// divide the loss of each micro-batch by the number of all micro-batches; with `loss_scaling: samples` a
/// partial micro-batch counts samples / batch_size of a full one. In a short step, where micro-batches or
/// samples are missing, that divisor is too large.
inline double mean_scale(const Request& request, const Tally& tally) {
  const auto full = total_of(request.shares, request.participants);
  if (request.by_samples) {
    const auto full_samples = full * request.batch_size;
    return tally.samples == 0 || tally.samples == full_samples ? 1.0
                                                               : double(full_samples) / double(tally.samples);
  }
  return tally.micro_batches == 0 || tally.micro_batches == full ? 1.0
                                                                 : double(full) / double(tally.micro_batches);
}

}  // namespace accelmgr::session
