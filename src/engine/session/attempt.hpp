// What host, supervisor and runners do with an attempt: they make the transitions of the step word and wake
// the processes that wait for them. No function here blocks or throws.
#pragma once

#include <cstdint>

#include "engine/session/layout.hpp"
#include "engine/session/session.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::session {

/// Host: writes the request, copies the state of ranks that do not take part to the other state copy, opens
/// the next attempt and wakes the runners. Returns its number, or 0 if the step word is not closed.
std::uint64_t open_attempt(const HostView& host, const Request& request) noexcept;

/// Runner: sets its bit in the step word. The last vote wakes the other participants; with `may_commit` false
/// the last vote is not cast.
/// Requires: the runner has written its ballot and its state copy.
Vote cast_vote(const RunnerView& runner, std::uint64_t attempt, bool may_commit = true) noexcept;

/// Any process: aborts the attempt unless it is committed, and wakes all processes. True if this call aborted
/// it. Async-signal-safe.
bool abort_attempt(const View& view, std::uint64_t attempt, std::uint32_t author) noexcept;

/// Runner: writes the reason into its record, then aborts the attempt. `what` is cut to text_bytes. True if
/// this call aborted it. Async-signal-safe.
bool refuse_attempt(const RunnerView& runner, std::uint64_t attempt, Reason reason,
                    const char* what) noexcept;

/// Whether the slices of all participants are reduced.
bool slices_finished(const Session& session, std::uint64_t attempt) noexcept;

/// Whether a committed attempt updates the parameters in the session. It does not if its gradients have no
/// weight.
bool updates_parameters(const Session& session) noexcept;

/// Whether there is nothing left to do for a committed attempt: all slices are reduced, and updated.
bool is_done(const Session& session, std::uint64_t attempt) noexcept;

/// Whether a participant of the last attempt, which is committed, has a gradient of the tensor.
bool gave_gradient(const Session& session, std::size_t tensor, std::uint64_t attempt) noexcept;

/// Whether the last attempt, which is committed, updates the tensor.
bool updates_tensor(const Session& session, std::size_t tensor, std::uint64_t attempt) noexcept;

/// The last step whose gradients the session has applied, or a host has begun to apply.
std::uint64_t applied_step(const Session& session) noexcept;

/// Any process: closes an aborted attempt, or a committed one that is done; wakes host and loader. True if
/// this call closed it.
bool close_if_over(const View& view, std::uint64_t attempt) noexcept;

/// The sum of the participants' ballots.
struct Tally {
  double loss = 0;    ///< Weighted sum; times mean_scale(), the mean loss.
  double weight = 0;  ///< The divisor of LossWeights::field.
  std::uint64_t samples = 0;
  std::uint64_t elements = 0;
  std::uint64_t micro_batches = 0;
  bool nonfinite = false;
  SumRange range{};
};

/// Adds up the participants' ballots in order of rank.
Tally tally(const Session& session, const Request& request) noexcept;

/// The factor that makes the sum of a step's losses or gradients their mean; 1 for a full step. Runners
/// divide the loss of each micro-batch by the number of all micro-batches; with `loss_scaling: samples` a
/// partial micro-batch counts samples / batch_size of a full one. In a short step, where micro-batches or
/// samples are missing, that divisor is too large. With `sum` and `sum_over` runners do not divide, since
/// none knows the total of a step; over a total of 0 the mean is 0.
inline double mean_scale(const Request& request, const Tally& tally) {
  if (request.loss_weights == LossWeights::none) return 1.0;
  if (request.loss_weights == LossWeights::field) return tally.weight == 0 ? 0.0 : 1 / tally.weight;
  const auto full = total_of(request.shares, request.participants);
  if (request.loss_weights == LossWeights::samples) {
    const auto full_samples = full * request.batch_size;
    return tally.samples == 0 || tally.samples == full_samples ? 1.0
                                                               : double(full_samples) / double(tally.samples);
  }
  return tally.micro_batches == 0 || tally.micro_batches == full ? 1.0
                                                                 : double(full) / double(tally.micro_batches);
}

/// The factor that makes the sum of the gradients in the slabs their mean.
inline double gradient_scale(const Request& request, const Tally& tally) {
  return mean_scale(request, tally) / request.loss_scale;
}

/// A bound for Counters::gradient_range when the attempt is committed.
double gradient_range_after(const Session& session, const Request& request, const Tally& tally) noexcept;

/// True if no sum of finite gradients can leave the range of its type, whichever elements of the slabs are
/// added. False: a sum may (Reduction::nonfinite_sums() looks).
/// Requires: all participants have voted, or are about to.
bool sums_fit(const Session& session, const Request& request) noexcept;

/// How far the reduction of a rank's slice has come. `chunk` counts from the slice's beginning, or is
/// cursor_finished. `in_flight`: the undo image holds this chunk, and its gradients may be half reduced.
struct Cursor {
  std::uint64_t attempt = 0;
  std::uint64_t chunk = 0;
  bool in_flight = false;
};
constexpr std::uint64_t encode(const Cursor& c) noexcept {
  return c.attempt << 27 | c.chunk << 1 | std::uint64_t{c.in_flight};
}
constexpr Cursor decode_cursor(std::uint64_t bits) noexcept {
  return {bits >> 27, bits >> 1 & ((1u << 26) - 1), (bits & 1) != 0};
}
/// The value of Cursor::chunk for a finished slice.
constexpr std::uint64_t cursor_finished = (1u << 26) - 1;

}  // namespace accelmgr::session
