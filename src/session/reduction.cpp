#include "session/reduction.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/clock.hpp"
#include "base/fault_point.hpp"
#include "session/kernels.hpp"

namespace accelmgr::session {
namespace {

// torch's numbers of the scalar types whose mean is taken; the floors without torch know no others.
constexpr std::int32_t torch_float32 = 6;
constexpr std::int32_t torch_float64 = 7;

// Overwriting needs no undo image; the cursor moves only so often that a takeover repeats little.
constexpr std::uint64_t overwrite_chunks = 256;

template <class T>
void mean_of(std::byte* out, const std::vector<const std::byte*>& ranks, std::size_t bytes) noexcept {
  for (std::size_t at = 0; at < bytes; at += sizeof(T)) {
    double sum = 0;
    for (const auto* rank : ranks) {
      T value;
      std::memcpy(&value, rank + at, sizeof value);
      sum += value;
    }
    const T mean = static_cast<T>(sum / double(ranks.size()));
    std::memcpy(out + at, &mean, sizeof mean);
  }
}

int position_of(int rank, RankMask participants) noexcept {
  return __builtin_popcount(participants & ((RankMask{1} << rank) - 1));
}

}  // namespace

Reduction::Reduction(const Session& session, const Manifest& manifest)
    : session_(&session), buffers_(manifest.buffers) {
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i)
    extents_.push_back({manifest.tensors[i].first, 0, i});
  std::sort(extents_.begin(), extents_.end(),
            [](const Extent& a, const Extent& b) { return a.first < b.first; });
  for (std::size_t i = 0; i < extents_.size(); ++i)
    extents_[i].end = i + 1 < extents_.size() ? extents_[i + 1].first : session.header().elements;
}

void Reduction::reset_cursor(int rank, std::uint64_t attempt) const noexcept {
  session_->record(rank).cursor.store(encode(Cursor{.attempt = attempt}));
}

std::vector<Reduction::Run> Reduction::runs_of(std::uint64_t first, std::uint64_t last, std::uint64_t attempt,
                                               RankMask participants) const {
  std::vector<Run> runs;
  auto extent = std::upper_bound(extents_.begin(), extents_.end(), first,
                                 [](std::uint64_t at, const Extent& e) { return at < e.end; });
  for (; extent != extents_.end() && extent->first < last; ++extent) {
    RankMask present = 0;
    for (int rank = 0; rank < session_->ranks(); ++rank) {
      if ((participants >> rank & 1) == 0) continue;
      if (session_->tags(rank)[extent->tensor].load(std::memory_order_relaxed) == attempt)
        present |= RankMask{1} << rank;
    }
    if (runs.empty() || runs.back().present != present) runs.push_back({extent->end, present});
    runs.back().end = extent->end;
  }
  return runs;
}

Reduction::Slabs Reduction::slabs_at(std::uint64_t first, RankMask present) const noexcept {
  const ElementTypes types{session_->header().element, session_->header().slab_element};
  Slabs slabs;
  for (int rank = 0; rank < session_->ranks(); ++rank)
    if ((present >> rank & 1) != 0)
      slabs.begin[slabs.count++] = session_->slab(rank) + first * slab_bytes_of(types);
  return slabs;
}

void Reduction::reduce(std::uint64_t first, std::uint64_t last, const std::vector<Run>& runs,
                       std::size_t& run, double scale, SumInto into) const noexcept {
  const auto& header = session_->header();
  const ElementTypes types{header.element, header.slab_element};
  const auto& kernels = best_kernels();
  while (first < last) {
    while (runs[run].end <= first) ++run;
    const auto end = std::min(last, runs[run].end);
    const auto slabs = slabs_at(first, runs[run].present);
    kernels.reduce(session_->gradients() + first * bytes_of(types.master), slabs.span(), end - first, types,
                   into, scale);
    first = end;
  }
}

void Reduction::publish_copies(const Request& request) const noexcept {
  const auto valid = session_->word().index;
  const auto& before = session_->counters(valid);
  auto& after = session_->counters(valid ^ 1);
  const auto total = tally(*session_, request);
  after.steps = before.steps + (request.skip == 0 ? 1 : 0);
  after.skips = before.skips + (request.skip == 0 ? 0 : 1);
  after.samples = before.samples + total.samples;
  after.elements = before.elements + total.elements;
  after.participants = request.participants;
  std::vector<const std::byte*> ranks;
  for (int rank = 0; rank < session_->ranks(); ++rank) {
    const bool takes_part = (request.participants >> rank & 1) != 0;
    const auto& ballot = session_->record(rank).ballot;
    after.rank_samples[rank] = before.rank_samples[rank] + (takes_part ? ballot.samples : 0);
    after.batches[rank] = before.batches[rank] + (takes_part ? ballot.micro_batches : 0);
    if (takes_part) ranks.push_back(session_->buffers(valid ^ 1, rank));
  }
  if (request.skip != 0) {
    std::memcpy(session_->result_buffers(valid ^ 1), session_->result_buffers(valid),
                session_->header().buffer_bytes);
    return;
  }
  for (const auto& buffer : buffers_) {
    std::vector<const std::byte*> sources;
    for (const auto* rank : ranks) sources.push_back(rank + buffer.offset);
    auto* out = session_->result_buffers(valid ^ 1) + buffer.offset;
    if (request.mean_buffers != 0 && buffer.dtype == torch_float32) {
      mean_of<float>(out, sources, buffer.bytes);
    } else if (request.mean_buffers != 0 && buffer.dtype == torch_float64) {
      mean_of<double>(out, sources, buffer.bytes);
    } else {
      std::memcpy(out, sources.front(), buffer.bytes);
    }
  }
}

void Reduction::finish_slice(int rank, std::uint64_t attempt) const noexcept {
  const auto& request = session_->control().request;
  auto& cursor_word = session_->record(rank).cursor;
  auto cursor = decode_cursor(cursor_word.load());
  if (cursor.attempt != attempt) cursor = {.attempt = attempt};
  if (cursor.chunk == cursor_finished) return;
  using base::FaultPhase;
  const auto started_ns = base::now_ns();

  const auto& header = session_->header();
  const auto element_bytes = bytes_of(header.element);
  const auto chunk_elements = chunk_bytes / element_bytes;
  const auto chunks = (header.elements + chunk_elements - 1) / chunk_elements;
  const auto position = position_of(rank, request.participants);
  const auto part = slice(chunks, position, __builtin_popcount(request.participants));
  const auto last = std::min(part.end * chunk_elements, header.elements);
  const auto runs = runs_of(part.begin * chunk_elements, last, attempt, request.participants);
  const double scale = mean_scale(request, tally(*session_, request));
  const auto overwrite = (part.end - part.begin) * chunk_bytes >= non_temporal_from_bytes
                             ? SumInto::overwrite_non_temporal
                             : SumInto::overwrite;
  auto move_to = [&](std::uint64_t chunk, bool in_flight) {
    cursor_word.store(encode(Cursor{attempt, chunk, in_flight}), std::memory_order_release);
    std::atomic_signal_fence(std::memory_order_seq_cst);  // Nor may the compiler move what follows before it.
  };

  std::size_t run = 0;
  std::uint64_t chunk = part.begin + cursor.chunk;
  if (request.skip != 0) {
    // Nothing to reduce: only the copies change.
  } else if (request.accumulate == 0) {
    for (; chunk < part.end; chunk = std::min(chunk + overwrite_chunks, part.end)) {
      const auto end = std::min(chunk + overwrite_chunks, part.end);
      reduce(chunk * chunk_elements, std::min(end * chunk_elements, last), runs, run, scale, overwrite);
      base::fault_point(FaultPhase::reduced);
      move_to(end - part.begin, false);
      base::fault_point(FaultPhase::chunk);
    }
  } else {
    auto* undo = session_->undo(rank);
    for (bool restore = cursor.in_flight; chunk < part.end; ++chunk, restore = false) {
      const auto first = chunk * chunk_elements;
      const auto end = std::min(first + chunk_elements, last);
      auto* master = session_->gradients() + first * element_bytes;
      const auto bytes = (end - first) * element_bytes;
      if (restore) {
        std::memcpy(master, undo, bytes);
      } else {
        best_kernels().save(undo, master, bytes);
      }
      base::fault_point(FaultPhase::undo_saved);
      move_to(chunk - part.begin, true);
      base::fault_point(FaultPhase::in_flight);
      reduce(first, end, runs, run, scale, SumInto::accumulate);
      base::fault_point(FaultPhase::reduced);
      move_to(chunk + 1 - part.begin, false);
      base::fault_point(FaultPhase::chunk);
    }
  }
  base::fault_point(FaultPhase::publish);
  if (position == 0) publish_copies(request);
  base::fault_point(FaultPhase::published);
  session_->record(rank).reduce_ns.store(static_cast<std::uint64_t>(base::now_ns() - started_ns));
  cursor_word.store(encode(Cursor{attempt, cursor_finished, false}));
}

}  // namespace accelmgr::session
