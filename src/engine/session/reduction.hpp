// The reduction of a committed attempt: each participant sums one slice of all participants' slabs into the
// master gradients, in one pass and in order of rank. A process may be killed at any instruction.
//
// A tag (layout.hpp) says which elements of a gradient a slab has. When the devices of a team have summed up
// their gradients before, each element of the sum lies in the slab of one of them; shards.hpp says in which.
//
// A large slice is cut into parts, which threads of the runner reduce at the same time. Each has a cursor and
// an undo image of its own.
//
// Overwriting can be repeated. Accumulating cannot, so it works chunk by chunk: copy the chunk to the rank's
// undo image, mark the cursor as in flight, reduce the chunk, move the cursor on. A process that takes over a
// slice first restores an in-flight chunk from its image. The stores of a killed process become visible in
// program order (src/README.md, Promises); non-temporal ones are fenced before the cursor moves.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "base/helper_threads.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/kernels_table.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/session.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::session {

/// The chunks [begin, end).
struct ChunkRange {
  std::uint64_t begin;
  std::uint64_t end;
};
/// One of `count` ranges of about the same length, which together have all chunks.
inline ChunkRange even_range(std::uint64_t chunks, int index, int count) {
  const auto i = static_cast<std::uint64_t>(index), n = static_cast<std::uint64_t>(count);
  return {chunks * i / n, chunks * (i + 1) / n};
}

inline int position_of(int rank, RankMask participants) noexcept {
  return __builtin_popcount(participants & ((RankMask{1} << rank) - 1));
}
/// The slice of a participant.
inline ChunkRange slice_of_rank(int rank, RankMask participants, std::uint64_t chunks) noexcept {
  return even_range(chunks, position_of(rank, participants), __builtin_popcount(participants));
}

/// A part of a slice has at least this many chunks. The number of parts follows from the slice alone: a
/// process that takes the slice over must find the same parts.
constexpr std::uint64_t part_chunks = 512;
/// The least number of parts for which helpers are called. Waking them takes as long as reducing a few parts.
/// For 475 MiB of one runner, two threads on two busy cores take 11 ms, and one takes 18; beside an H100 one
/// took 54 ms, and the model 45.
constexpr int helped_from_parts = 4;
inline int parts_in(const ChunkRange& slice) noexcept {
  return static_cast<int>(std::clamp<std::uint64_t>((slice.end - slice.begin) / part_chunks, 1, max_parts));
}

inline void move_cursor(std::atomic<std::uint64_t>& cursor, const Cursor& to) noexcept {
  cursor.store(encode(to), std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);  // Keeps the compiler from moving later stores up.
}

/// Any process that maps the session can finish any slice. Each process has one Reduction, for one thread.
class Reduction {
 public:
  Reduction(const View& view, const Manifest& manifest);

  /// Runner: sets the cursor of its slice to "not begun" for `attempt`. Call it before the vote.
  void reset_cursor(int rank, std::uint64_t attempt) const noexcept;

  /// Reduces the slice of `rank` from its cursors to its end. The threads of `helpers`, if there are any,
  /// take parts of a large slice. Waits for nobody but helpers, and allocates no memory.
  /// Requires: the attempt is committed. The caller is the runner of `rank`, or another process once that
  /// runner is known to be dead.
  void finish_slice(int rank, std::uint64_t attempt, base::Helpers* helpers = nullptr) const noexcept;

  /// The tensors whose gradients are finite in all slabs, and would not be finite in the master if `attempt`
  /// were committed. Reads all slabs.
  /// Requires: its participants have written their slabs and ballots.
  std::vector<std::size_t> nonfinite_sums(std::uint64_t attempt) const;

 private:
  /// The part of one participant in the reduction of an attempt.
  struct Slice {
    int rank;
    std::uint64_t attempt;
    RankMask participants;
    ChunkRange chunks;
    double scale;
    bool accumulates;
  };
  /// A part of a slice, which one thread reduces.
  struct Part {
    ChunkRange chunks;
    std::atomic<std::uint64_t>& cursor;
    std::byte* undo;
  };
  /// The gradient of a tensor, up to the next one: bytes of the master.
  struct GradientRange {
    std::uint64_t first, end;
    std::uint64_t tensor;
    std::uint64_t slab;  ///< Where it begins in a slab.
    ElementTypes types;
    bool goes_on;  ///< In master and slab it lies right behind the previous range, and has the same types.
  };
  /// Chunks of the master that lie one behind the other: the gradients that are trained from the start, or
  /// that of an unfrozen parameter.
  struct Piece {
    std::uint64_t first, end;        ///< In bytes.
    std::uint64_t chunk, end_chunk;  ///< The numbers of its chunks.
  };
  /// A range of the master whose elements are in the same slabs in this attempt.
  struct Run {
    std::uint64_t end = 0;  ///< In bytes; the run begins where the one before ends.
    RankMask present = 0;
    const GradientRange* range = nullptr;  ///< The first one.
  };
  /// The runs of a slice, one after the other.
  class Runs;
  /// The addresses of the same thing of several ranks.
  template <class T>
  struct OfRanks {
    std::array<const T*, max_ranks> begin;
    std::size_t count = 0;
    void add(const T* one) noexcept { begin[count++] = one; }
    std::span<const T* const> span() const noexcept { return {begin.data(), count}; }
  };
  static Piece piece(std::uint64_t first, std::uint64_t end, std::uint64_t chunk) noexcept {
    return {first, end, chunk, chunk + (end - first + chunk_bytes - 1) / chunk_bytes};
  }
  template <class Body>
  void for_pieces(Body&& body) const noexcept;
  Slice all_of(std::uint64_t attempt) const noexcept;
  Slice slice_of(int rank, std::uint64_t attempt) const noexcept;
  OfRanks<void> slabs_at(std::uint64_t byte, const Run& run) const noexcept;
  /// The bytes [first, end) of a run.
  void reduce_run(std::byte* to, std::uint64_t first, std::uint64_t end, const Run& run, double scale,
                  SumInto into) const noexcept;
  void reduce(std::uint64_t first, std::uint64_t last, Runs& runs, double scale, SumInto into) const noexcept;
  Part part_of(const Slice& slice, int index, int parts) const noexcept;
  void finish_part(const Slice& slice, const Part& part) const noexcept;
  void overwrite(const Slice& slice, const Part& part, std::uint64_t chunks_done) const noexcept;
  void accumulate(const Slice& slice, const Part& part, Cursor from) const noexcept;
  double squares_of(const Slice& slice) const noexcept;
  void publish_counters(const Request& request, std::uint64_t attempt) const noexcept;
  void publish_buffers(const Request& request) const noexcept;

  Session* session_;                   ///< Not a view: a process may finish the slice of any rank.
  std::vector<GradientRange> ranges_;  ///< In order of `first`; without tensors that have no elements.
  std::vector<BufferEntry> buffers_;
};

}  // namespace accelmgr::session
