#include "engine/session/reduction.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/clock.hpp"
#include "base/fault_point.hpp"
#include "engine/session/kernels.hpp"

namespace accelmgr::session {
namespace {

// Overwriting needs no undo image. The cursor moves once in this many chunks, so that a process that takes
// over repeats little.
constexpr std::uint64_t overwrite_chunks = 256;

/// The mean over ranks of a buffer that begins `offset` bytes after each of `ranks`.
template <class T>
void mean_of(std::byte* out, std::span<const std::byte* const> ranks, std::size_t offset,
             std::size_t bytes) noexcept {
  for (std::size_t at = 0; at < bytes; at += sizeof(T)) {
    double sum = 0;
    for (const auto* rank : ranks) {
      T value;
      std::memcpy(&value, rank + offset + at, sizeof value);
      sum += value;
    }
    const T mean = static_cast<T>(sum / double(ranks.size()));
    std::memcpy(out + at, &mean, sizeof mean);
  }
}

}  // namespace

Reduction::Reduction(const View& view, const Manifest& manifest)
    : session_(view.memory_), buffers_(manifest.buffers) {
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
    const auto& t = manifest.tensors[i];
    if (t.count == 0 || !t.has_room()) continue;
    const auto gap_elements = align_up(t.count, region_alignment / size_of(t.dtype)) - t.count;
    const auto end =
        t.gradient + t.gradient_bytes() + gap_elements * elements_in(t.dtype) * bytes_of(t.types.master);
    ranges_.push_back(
        {.first = t.gradient, .end = end, .tensor = i, .slab = t.slab, .types = t.types, .goes_on = false});
  }
  std::ranges::sort(ranges_, {}, &GradientRange::first);
  for (std::size_t i = 1; i < ranges_.size(); ++i) {
    const auto &before = ranges_[i - 1], &here = ranges_[i];
    const auto elements = (before.end - before.first) / bytes_of(before.types.master);
    ranges_[i].goes_on = here.types == before.types && here.first == before.end &&
                         here.slab == before.slab + elements * bytes_of(before.types.slab);
  }
}

void Reduction::reset_cursor(int rank, std::uint64_t attempt) const noexcept {
  session_->record(rank).cursor.store(encode(Cursor{.attempt = attempt}));
}

class Reduction::Runs {
 public:
  /// The runs within the bytes [first, last) of a piece.
  Runs(const Reduction& reduction, const Slice& slice, std::uint64_t first, std::uint64_t last) noexcept
      : session_(*reduction.session_),
        slice_(slice),
        begin_(first),
        last_(last),
        next_(std::upper_bound(reduction.ranges_.begin(), reduction.ranges_.end(), first,
                               [](std::uint64_t at, const GradientRange& e) { return at < e.end; })),
        end_(reduction.ranges_.end()) {}

  /// The run of a byte.
  /// Requires: `byte` is not less than in the previous call.
  const Run& at(std::uint64_t byte) noexcept {
    while (run_.end <= byte) go_on();
    return run_;
  }

 private:
  void go_on() noexcept {
    run_ = part(begin_);
    while (run_.end == next_->end) {
      ++next_;
      if (next_ == end_ || next_->first >= last_ || !next_->goes_on) break;
      const auto following = part(run_.end);
      if (following.present != run_.present) break;
      run_.end = following.end;
    }
    begin_ = run_.end;
  }
  /// The run from that byte on, as far as the same slabs have the elements of one tensor.
  Run part(std::uint64_t from) const noexcept {
    Run run{0, 0, &*next_};
    const auto size = bytes_of(next_->types.master);
    const auto element = (from - next_->first) / size;
    auto end = (next_->end - next_->first) / size;
    for (int rank = 0; rank < session_.ranks(); ++rank) {
      if ((slice_.participants >> rank & 1) == 0) continue;
      const auto& tag = session_.tags(rank)[next_->tensor];
      if (tag.load() != slice_.attempt || element >= tag.end()) continue;
      const bool begins_later = element < tag.first();
      if (!begins_later) run.present |= RankMask{1} << rank;
      end = std::min(end, begins_later ? tag.first() : tag.end());
    }
    run.end = next_->first + end * size;
    return run;
  }

  const Session& session_;
  const Slice& slice_;
  std::uint64_t begin_;  ///< Where the next run begins.
  std::uint64_t last_;
  std::vector<GradientRange>::const_iterator next_, end_;
  Run run_;
};

/// Calls body(piece) for the pieces of an attempt, in the order of their chunks.
template <class Body>
void Reduction::for_pieces(Body&& body) const noexcept {
  const auto trained = session_->header().bytes.gradients;
  auto last = piece(0, trained, 0);
  body(last);
  if (session_->control().unfrozen_bytes.load(std::memory_order_relaxed) == 0) return;
  const auto unfrozen = std::as_const(*session_).unfrozen();
  const auto frozen = std::ranges::lower_bound(ranges_, trained, {}, &GradientRange::first);
  for (auto range = frozen; range != ranges_.end(); ++range) {
    if (unfrozen[range->tensor].load(std::memory_order_relaxed) == 0) continue;
    last = piece(range->first, range->end, last.end_chunk);
    body(last);
  }
}

Reduction::OfRanks<void> Reduction::slabs_at(std::uint64_t byte, const Run& run) const noexcept {
  const auto& range = *run.range;
  const auto offset =
      range.slab + (byte - range.first) / bytes_of(range.types.master) * bytes_of(range.types.slab);
  OfRanks<void> slabs;  // In order of rank, in which the kernels add them.
  for (int rank = 0; rank < session_->ranks(); ++rank)
    if ((run.present >> rank & 1) != 0) slabs.add(session_->slab(rank) + offset);
  return slabs;
}

void Reduction::reduce_run(std::byte* to, std::uint64_t first, std::uint64_t end, const Run& run,
                           double scale, SumInto into) const noexcept {
  const auto& types = run.range->types;
  best_kernels().reduce(to, slabs_at(first, run).span(), (end - first) / bytes_of(types.master), types, into,
                        scale);
}

void Reduction::reduce(std::uint64_t first, std::uint64_t last, Runs& runs, double scale,
                       SumInto into) const noexcept {
  while (first < last) {
    const auto& run = runs.at(first);
    const auto end = std::min(last, run.end);
    reduce_run(session_->gradients() + first, first, end, run, scale, into);
    first = end;
  }
}

std::vector<std::size_t> Reduction::nonfinite_sums(std::uint64_t attempt) const {
  const auto all = all_of(attempt);
  const auto into = all.accumulates ? SumInto::accumulate : SumInto::overwrite;
  std::vector<std::size_t> tensors;
  alignas(region_alignment) std::byte sums[chunk_bytes];
  // Whether the sums of a range are finite. Goes from part to part, and stops at one that is not.
  const auto finite = [&](const GradientRange& range, Runs& runs) {
    for (auto first = range.first; first < range.end;) {
      const auto& run = runs.at(first);
      const auto end = std::min({range.end, run.end, first + chunk_bytes});
      const auto bytes = end - first;
      std::memcpy(sums, session_->gradients() + first, bytes);
      reduce_run(sums, first, end, run, all.scale, into);
      const auto& master = range.types.master;
      if (!std::isfinite(best_kernels().largest(sums, bytes / bytes_of(master), master))) return false;
      first = end;
    }
    return true;
  };
  for_pieces([&](const Piece& piece) {
    Runs runs(*this, all, piece.first, piece.end);
    auto range = std::ranges::lower_bound(ranges_, piece.first, {}, &GradientRange::first);
    for (; range != ranges_.end() && range->first < piece.end; ++range)
      if (!finite(*range, runs)) tensors.push_back(range->tensor);
  });
  std::ranges::sort(tensors);
  return tensors;
}

/// Sums over the gradients that are trained from the start: an update applies only these.
double Reduction::squares_of(const Slice& slice) const noexcept {
  const auto first = slice.chunks.begin * chunk_bytes;
  const auto end = std::min(slice.chunks.end * chunk_bytes, session_->header().bytes.gradients);
  double sum = 0;
  auto range = std::ranges::upper_bound(ranges_, first, {}, &GradientRange::end);
  for (; range != ranges_.end() && range->first < end; ++range) {
    const auto from = std::max(first, range->first), to = std::min(end, range->end);
    const auto type = range->types.master;
    sum += best_kernels().squares(session_->gradients() + from, (to - from) / bytes_of(type), type);
  }
  return sum;
}

void Reduction::publish_counters(const Request& request, std::uint64_t attempt) const noexcept {
  const auto valid = session_->word().index;
  const auto& before = session_->counters(valid);
  auto& after = session_->counters(valid ^ 1);
  const auto total = tally(*session_, request);
  after.steps = before.steps + (request.skip == 0 ? 1 : 0);
  after.skips = before.skips + (request.skip == 0 || request.call != 0 ? 0 : 1);
  after.samples = before.samples + total.samples;
  const bool repeats = request.repeat != 0;
  after.elements = before.elements + (repeats ? 0 : total.elements);
  after.last_elements = repeats ? before.last_elements : request.skip != 0 ? 0 : total.elements;
  after.participants = request.participants;
  const bool updates = updates_parameters(*session_);
  const auto updates_before = std::as_const(*session_).updates(valid);
  const auto updates_after = session_->updates(valid ^ 1);
  for (std::size_t i = 0; i < updates_after.size(); ++i)
    updates_after[i] = updates_before[i] + (updates && updates_tensor(*session_, i, attempt) ? 1 : 0);
  after.updated_step = updates ? std::uint64_t{after.steps} : std::uint64_t{before.updated_step};
  after.gradient_range = gradient_range_after(*session_, request, total);
  after.loss_scale = request.skip != 0 || total.nonfinite ? before.loss_scale : request.next_loss_scale;
  for (int rank = 0; rank < session_->ranks(); ++rank) {
    const bool takes_part = (request.participants >> rank & 1) != 0;
    const auto& ballot = session_->record(rank).ballot;
    after.rank_samples[rank] = before.rank_samples[rank] + (takes_part ? ballot.samples : 0);
    const std::uint64_t batches = takes_part ? request.shares.of[rank] : 0;  // Batches without elements, too.
    after.batches[rank] = before.batches[rank] + (repeats ? 0 : batches);
    after.last_batches[rank] = repeats ? before.last_batches[rank] : request.skip != 0 ? 0 : batches;
  }
}

void Reduction::publish_buffers(const Request& request) const noexcept {
  const auto valid = session_->word().index;
  auto* result = session_->result_buffers(valid ^ 1);
  if (request.skip != 0) {
    std::memcpy(result, session_->result_buffers(valid), session_->header().buffer_bytes);
    return;
  }
  OfRanks<std::byte> ranks;
  for (int rank = 0; rank < session_->ranks(); ++rank)
    if ((request.participants >> rank & 1) != 0) ranks.add(session_->buffers(valid ^ 1, rank));
  for (const auto& buffer : buffers_) {
    auto* out = result + buffer.offset;
    if (request.mean_buffers != 0 && buffer.dtype == DType::float32) {
      mean_of<float>(out, ranks.span(), buffer.offset, buffer.bytes);
    } else if (request.mean_buffers != 0 && buffer.dtype == DType::float64) {
      mean_of<double>(out, ranks.span(), buffer.offset, buffer.bytes);
    } else {
      std::memcpy(out, ranks.span().front() + buffer.offset, buffer.bytes);
    }
  }
}

/// A slice with all chunks.
Reduction::Slice Reduction::all_of(std::uint64_t attempt) const noexcept {
  const auto& request = session_->control().request;
  std::uint64_t chunks = 0;
  for_pieces([&](const Piece& piece) { chunks = piece.end_chunk; });
  return {.rank = 0,
          .attempt = attempt,
          .participants = request.participants,
          .chunks = {0, chunks},
          .scale = gradient_scale(request, tally(*session_, request)),
          .accumulates = request.accumulate != 0};
}

Reduction::Slice Reduction::slice_of(int rank, std::uint64_t attempt) const noexcept {
  const RankMask participants = session_->control().request.participants;
  auto mine = all_of(attempt);
  mine.rank = rank;
  mine.chunks = slice_of_rank(rank, participants, mine.chunks.end);
  return mine;
}

Reduction::Part Reduction::part_of(const Slice& slice, int index, int parts) const noexcept {
  const auto& [begin, end] = slice.chunks;
  const auto chunks = even_range(end - begin, index, parts);
  auto& record = session_->record(slice.rank);
  return {.chunks = {begin + chunks.begin, begin + chunks.end},
          .cursor = index == 0 ? record.cursor : record.more_cursors[index - 1].bits,
          .undo = session_->undo(slice.rank, index)};
}

void Reduction::finish_part(const Slice& slice, const Part& part) const noexcept {
  auto cursor = decode_cursor(part.cursor.load());
  if (cursor.attempt != slice.attempt) cursor = {.attempt = slice.attempt};
  if (slice.accumulates)
    accumulate(slice, part, cursor);
  else
    overwrite(slice, part, cursor.chunk);
}

void Reduction::overwrite(const Slice& slice, const Part& part, std::uint64_t chunks_done) const noexcept {
  const auto begin = part.chunks.begin, end = part.chunks.end;  // Clang 14 captures no binding.
  const auto slice_bytes = (slice.chunks.end - slice.chunks.begin) * chunk_bytes;
  const auto into =
      slice_bytes >= non_temporal_from_bytes ? SumInto::overwrite_non_temporal : SumInto::overwrite;
  auto chunk = begin + chunks_done;
  for_pieces([&](const Piece& piece) {
    const auto byte_of = [&](std::uint64_t number) {
      return std::min(piece.first + (number - piece.chunk) * chunk_bytes, piece.end);
    };
    const auto last = std::min(end, piece.end_chunk);
    if (chunk >= last) return;
    Runs runs(*this, slice, byte_of(chunk), byte_of(last));
    while (chunk < last) {
      const auto next = std::min(chunk + overwrite_chunks, last);
      reduce(byte_of(chunk), byte_of(next), runs, slice.scale, into);
      base::fault_point(base::FaultPhase::reduced);
      move_cursor(part.cursor, {slice.attempt, next - begin, false});
      base::fault_point(base::FaultPhase::chunk);
      chunk = next;
    }
  });
}

void Reduction::accumulate(const Slice& slice, const Part& part, Cursor from) const noexcept {
  const auto begin = part.chunks.begin, end = part.chunks.end;  // Clang 14 captures no binding.
  auto chunk = begin + from.chunk;
  for_pieces([&](const Piece& piece) {
    const auto last = std::min(end, piece.end_chunk);
    if (chunk >= last) return;
    auto first = piece.first + (chunk - piece.chunk) * chunk_bytes;
    Runs runs(*this, slice, first, std::min(piece.first + (last - piece.chunk) * chunk_bytes, piece.end));
    for (; chunk < last; ++chunk, first += chunk_bytes) {
      const auto bytes = std::min(chunk_bytes, piece.end - first);
      auto* master = session_->gradients() + first;
      if (std::exchange(from.in_flight, false)) {
        std::memcpy(master, part.undo, bytes);
      } else {
        best_kernels().save(part.undo, master, bytes);
      }
      base::fault_point(base::FaultPhase::undo_saved);
      move_cursor(part.cursor, {slice.attempt, chunk - begin, true});
      base::fault_point(base::FaultPhase::in_flight);
      reduce(first, first + bytes, runs, slice.scale, SumInto::accumulate);
      base::fault_point(base::FaultPhase::reduced);
      move_cursor(part.cursor, {slice.attempt, chunk + 1 - begin, false});
      base::fault_point(base::FaultPhase::chunk);
    }
  });
}

void Reduction::finish_slice(int rank, std::uint64_t attempt, base::Helpers* helpers) const noexcept {
  const auto& request = session_->control().request;
  auto& record = session_->record(rank);
  const auto cursor = decode_cursor(record.cursor.load());
  if (cursor.attempt == attempt && cursor.chunk == cursor_finished) return;
  const auto started_ns = base::now_ns();

  // Otherwise nothing is reduced; only the state copies change.
  if (request.skip == 0 && request.applies != Applies::one_replica) {
    const auto slice = slice_of(rank, attempt);
    const int parts = parts_in(slice.chunks);
    const auto finish = [&](int part) { finish_part(slice, part_of(slice, part, parts)); };
    if (helpers != nullptr && parts >= helped_from_parts)
      helpers->for_each(parts, finish);
    else
      for (int part = 0; part < parts; ++part) finish(part);
  }
  if (updates_parameters(*session_) && request.update.clip_norm > 0)
    record.squares.store(squares_of(slice_of(rank, attempt)));
  base::fault_point(base::FaultPhase::publish);
  if (position_of(rank, request.participants) == 0) {
    publish_counters(request, attempt);
    publish_buffers(request);
  }
  base::fault_point(base::FaultPhase::published);
  record.reduce_ns.store(static_cast<std::uint64_t>(base::now_ns() - started_ns));
  record.cursor.store(encode(Cursor{attempt, cursor_finished, false}));
}

}  // namespace accelmgr::session
