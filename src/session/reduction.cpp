#include "session/reduction.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/clock.hpp"
#include "base/fault_point.hpp"
#include "session/kernels.hpp"

namespace accelmgr::session {
namespace {

// Overwriting needs no undo image. The cursor moves once in so many chunks, so that a process that takes over
// repeats little.
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

/// The rank at `position` of a team.
int rank_at(int position, RankMask team) noexcept {
  while (position-- > 0) team &= team - 1;
  return __builtin_ctz(team);
}

int position_of(int rank, RankMask participants) noexcept {
  return __builtin_popcount(participants & ((RankMask{1} << rank) - 1));
}

}  // namespace

Reduction::Reduction(const View& view, const Manifest& manifest)
    : session_(view.memory_), buffers_(manifest.buffers), shards_(manifest, view.session().header().element) {
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i)
    if (manifest.tensors[i].count != 0)  // Without elements it begins where another one does.
      extents_.push_back({manifest.tensors[i].first, 0, i});
  std::sort(extents_.begin(), extents_.end(),
            [](const Extent& a, const Extent& b) { return a.first < b.first; });
  for (std::size_t i = 0; i < extents_.size(); ++i)
    extents_[i].end = i + 1 < extents_.size() ? extents_[i + 1].first : session_->header().elements;
}

void Reduction::reset_cursor(int rank, std::uint64_t attempt) const noexcept {
  session_->record(rank).cursor.store(encode(Cursor{.attempt = attempt}));
}

class Reduction::Runs {
 public:
  Runs(const Reduction& reduction, const Slice& slice, std::uint64_t first) noexcept
      : session_(*reduction.session_),
        shards_(reduction.shards_),
        slice_(slice),
        begin_(first),
        next_(std::upper_bound(reduction.extents_.begin(), reduction.extents_.end(), first,
                               [](std::uint64_t at, const Extent& e) { return at < e.end; })),
        end_(reduction.extents_.end()) {}

  /// The run of an element of the slice. `element` must not be less than in the call before.
  const Run& at(std::uint64_t element) noexcept {
    while (run_.end <= element) go_on();
    return run_;
  }

 private:
  void go_on() noexcept {
    if (slice_.teams.count != 0) return go_on_by_shards();
    run_ = {next_->end, present(*next_)};
    for (++next_; next_ != end_ && next_->first < slice_.last && present(*next_) == run_.present; ++next_)
      run_.end = next_->end;
  }
  // A shard may end within a tensor, and a tensor within a shard.
  void go_on_by_shards() noexcept {
    for (run_ = pass(); next_ != end_ && begin_ < slice_.last && part().present == run_.present;)
      run_.end = pass().end;
  }
  Run pass() noexcept {
    const auto passed = part();
    begin_ = passed.end;
    if (begin_ == next_->end) ++next_;
    return passed;
  }
  /// From `begin_` on, as far as the same slabs hold the elements of one tensor.
  Run part() const noexcept {
    Run run{next_->end, present(*next_)};
    for (const auto team : slice_.teams.span()) {
      const auto holder = shards_.holder_of(begin_, __builtin_popcount(team));
      run.end = std::min(run.end, holder.end);
      if (holder.position >= 0) run.present |= RankMask{1} << rank_at(holder.position, team);
    }
    return run;
  }
  RankMask present(const Extent& extent) const noexcept {
    RankMask ranks = 0;
    for (int rank = 0; rank < session_.ranks(); ++rank) {
      if ((slice_.alone >> rank & 1) == 0) continue;
      if (session_.tags(rank)[extent.tensor].load(std::memory_order_relaxed) == slice_.attempt)
        ranks |= RankMask{1} << rank;
    }
    return ranks;
  }

  const Session& session_;
  const ShardPlan& shards_;
  const Slice& slice_;
  std::uint64_t begin_;  ///< Where the next run begins; used with teams.
  std::vector<Extent>::const_iterator next_, end_;
  Run run_;
};

Reduction::OfRanks<void> Reduction::slabs_at(std::uint64_t first, RankMask present) const noexcept {
  const ElementTypes types{session_->header().element, session_->header().slab_element};
  OfRanks<void> slabs;
  for (int rank = 0; rank < session_->ranks(); ++rank)
    if ((present >> rank & 1) != 0) slabs.add(session_->slab(rank) + first * slab_bytes_of(types));
  return slabs;
}

void Reduction::reduce(std::uint64_t first, std::uint64_t last, Runs& runs, double scale,
                       SumInto into) const noexcept {
  const auto& header = session_->header();
  const ElementTypes types{header.element, header.slab_element};
  const auto& kernels = best_kernels();
  while (first < last) {
    const auto& run = runs.at(first);
    const auto end = std::min(last, run.end);
    const auto slabs = slabs_at(first, run.present);
    kernels.reduce(session_->gradients() + first * bytes_of(types.master), slabs.span(), end - first, types,
                   into, scale);
    first = end;
  }
}

void Reduction::publish_counters(const Request& request) const noexcept {
  const auto valid = session_->word().index;
  const auto& before = session_->counters(valid);
  auto& after = session_->counters(valid ^ 1);
  const auto total = tally(*session_, request);
  after.steps = before.steps + (request.skip == 0 ? 1 : 0);
  after.skips = before.skips + (request.skip == 0 ? 0 : 1);
  after.samples = before.samples + total.samples;
  const bool repeats = request.repeat != 0;
  after.elements = before.elements + (repeats ? 0 : total.elements);
  after.last_elements = repeats ? before.last_elements : request.skip != 0 ? 0 : total.elements;
  after.participants = request.participants;
  after.loss_scale = request.skip != 0 || total.nonfinite ? before.loss_scale : request.next_loss_scale;
  for (int rank = 0; rank < session_->ranks(); ++rank) {
    const bool takes_part = (request.participants >> rank & 1) != 0;
    const auto& ballot = session_->record(rank).ballot;
    after.rank_samples[rank] = before.rank_samples[rank] + (takes_part ? ballot.samples : 0);
    const std::uint64_t batches = takes_part ? ballot.micro_batches : 0;
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

std::uint64_t Reduction::chunk_elements() const noexcept {
  return chunk_bytes / bytes_of(session_->header().element);
}

Reduction::Teams Reduction::teams_of(RankMask participants) const noexcept {
  Teams teams;
  for (int rank = 0; rank < session_->ranks(); ++rank) {
    if ((participants >> rank & 1) == 0) continue;
    const auto team = session_->record(rank).ballot.team;
    // The lowest rank of a team stands for it.
    if (team != 0 && __builtin_ctz(team) == rank) teams.ranks[teams.count++] = team;
  }
  return teams;
}

Reduction::Slice Reduction::slice_of(int rank, std::uint64_t attempt) const noexcept {
  const auto& request = session_->control().request;
  const auto elements = session_->header().elements;
  const auto chunks = (elements + chunk_elements() - 1) / chunk_elements();
  const auto part =
      slice(chunks, position_of(rank, request.participants), __builtin_popcount(request.participants));
  const auto teams = teams_of(request.participants);
  RankMask alone = request.participants;
  for (const auto team : teams.span()) alone &= ~team;
  return {.rank = rank,
          .attempt = attempt,
          .alone = alone,
          .teams = teams,
          .chunks = part,
          .last = std::min(part.end * chunk_elements(), elements),
          .scale = mean_scale(request, tally(*session_, request)) / request.loss_scale};
}

void Reduction::move_cursor(int rank, const Cursor& to) const noexcept {
  session_->record(rank).cursor.store(encode(to), std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);  // Keeps the compiler from moving later stores up.
}

void Reduction::overwrite(const Slice& slice, std::uint64_t chunks_done) const noexcept {
  const auto [begin, end] = slice.chunks;
  const auto into = (end - begin) * chunk_bytes >= non_temporal_from_bytes ? SumInto::overwrite_non_temporal
                                                                           : SumInto::overwrite;
  const auto elements = chunk_elements();
  auto chunk = begin + chunks_done;
  Runs runs(*this, slice, chunk * elements);
  while (chunk < end) {
    const auto next = std::min(chunk + overwrite_chunks, end);
    reduce(chunk * elements, std::min(next * elements, slice.last), runs, slice.scale, into);
    base::fault_point(base::FaultPhase::reduced);
    move_cursor(slice.rank, {slice.attempt, next - begin, false});
    base::fault_point(base::FaultPhase::chunk);
    chunk = next;
  }
}

void Reduction::accumulate(const Slice& slice, const Cursor& from) const noexcept {
  const auto element_bytes = bytes_of(session_->header().element);
  const auto [begin, end] = slice.chunks;
  const auto elements = chunk_elements();
  auto* undo = session_->undo(slice.rank);
  auto chunk = begin + from.chunk;
  Runs runs(*this, slice, chunk * elements);
  for (bool restore = from.in_flight; chunk < end; ++chunk, restore = false) {
    const auto first = chunk * elements;
    const auto last = std::min(first + elements, slice.last);
    auto* master = session_->gradients() + first * element_bytes;
    const auto bytes = (last - first) * element_bytes;
    if (restore) {
      std::memcpy(master, undo, bytes);
    } else {
      best_kernels().save(undo, master, bytes);
    }
    base::fault_point(base::FaultPhase::undo_saved);
    move_cursor(slice.rank, {slice.attempt, chunk - begin, true});
    base::fault_point(base::FaultPhase::in_flight);
    reduce(first, last, runs, slice.scale, SumInto::accumulate);
    base::fault_point(base::FaultPhase::reduced);
    move_cursor(slice.rank, {slice.attempt, chunk + 1 - begin, false});
    base::fault_point(base::FaultPhase::chunk);
  }
}

void Reduction::finish_slice(int rank, std::uint64_t attempt) const noexcept {
  const auto& request = session_->control().request;
  auto& record = session_->record(rank);
  auto cursor = decode_cursor(record.cursor.load());
  if (cursor.attempt != attempt) cursor = {.attempt = attempt};
  if (cursor.chunk == cursor_finished) return;
  const auto started_ns = base::now_ns();

  const auto slice = slice_of(rank, attempt);
  if (request.skip == 0) {  // Otherwise nothing is reduced; only the state copies change.
    if (request.accumulate == 0)
      overwrite(slice, cursor.chunk);
    else
      accumulate(slice, cursor);
  }
  base::fault_point(base::FaultPhase::publish);
  if (position_of(rank, request.participants) == 0) {
    publish_counters(request);
    publish_buffers(request);
  }
  base::fault_point(base::FaultPhase::published);
  record.reduce_ns.store(static_cast<std::uint64_t>(base::now_ns() - started_ns));
  record.cursor.store(encode(Cursor{attempt, cursor_finished, false}));
}

}  // namespace accelmgr::session
