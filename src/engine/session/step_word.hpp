// The step word: the whole state of an attempt in 64 bits, changed by compare-and-swap alone.
//
//    63                        27  26    25     24   23            0
//   +-----------------------------+-----+------+-----+---------------+
//   | attempt (37)                |index|closed|abort| mask (24)     |
//   +-----------------------------+-----+------+-----+---------------+
//
// clang-format off
//   | state                          | meaning                                | next                                   |
//   |--------------------------------|----------------------------------------|----------------------------------------|
//   | closed                         | between attempts: the host may write   | open():  attempt + 1, mask empty       |
//   | open, mask < participants      | computing                              | vote(): bit set; abort(): abort bit    |
//   | open, mask = participants      | committed: any surviving process can   | close(): index flips                   |
//   |                                | finish the reduction                   |                                        |
//   | abort                          | over; mask holds the author's number   | close(): index unchanged               |
// clang-format on
//
// The first CAS wins, so an attempt is committed or aborted, never both. The index names the valid one of the
// two copies of everything that an attempt changes beside the gradients (buffers, generator states, counters,
// data cursor): closing *is* publication. Only this file makes the transitions.
#pragma once

#include <atomic>
#include <cstdint>

namespace accelmgr::session {

constexpr int max_ranks = 24;

/// A set of ranks, bit r for rank r.
using RankMask = std::uint32_t;

constexpr RankMask all_ranks(int nprocs) { return (RankMask{1} << nprocs) - 1; }

/// Who aborted an attempt: the rank of a runner, or one of these.
constexpr std::uint32_t author_supervisor = 64;
constexpr std::uint32_t author_host = 65;

struct StepWord {
  std::uint64_t attempt = 0;
  std::uint32_t index = 0;
  bool closed = true;
  bool abort = false;
  std::uint32_t mask = 0;

  bool committed(RankMask participants) const noexcept { return !closed && !abort && mask == participants; }
  bool computing(RankMask participants) const noexcept { return !closed && !abort && mask != participants; }
  bool operator==(const StepWord&) const = default;
};

constexpr std::uint64_t encode(const StepWord& w) noexcept {
  return w.attempt << 27 | std::uint64_t{w.index} << 26 | std::uint64_t{w.closed} << 25 |
         std::uint64_t{w.abort} << 24 | (w.mask & 0xffffffu);
}
constexpr StepWord decode(std::uint64_t bits) noexcept {
  return {bits >> 27, static_cast<std::uint32_t>(bits >> 26 & 1), (bits >> 25 & 1) != 0,
          (bits >> 24 & 1) != 0, static_cast<std::uint32_t>(bits & 0xffffffu)};
}
/// What a fresh session starts with: attempt 0, closed.
constexpr std::uint64_t initial_step_word = encode(StepWord{});

enum class Vote {
  would_commit,  ///< It would be the last vote, and `may_commit` is false; nothing was changed.
  counted,       ///< The bit is set; others are missing.
  committed,     ///< The bit is set, and it was the last.
  over,          ///< The attempt was aborted or is no longer the current one; nothing was changed.
};

/// Opens the next attempt; returns its number, or 0 when the word is not closed.
std::uint64_t open(std::atomic<std::uint64_t>& word) noexcept;
Vote vote(std::atomic<std::uint64_t>& word, std::uint64_t attempt, int rank, RankMask participants,
          bool may_commit = true) noexcept;
/// True when this call set the abort bit; false when the attempt is committed, aborted or over already.
bool abort(std::atomic<std::uint64_t>& word, std::uint64_t attempt, std::uint32_t author,
           RankMask participants) noexcept;
/// Ends a committed or aborted attempt; true when this call did. Late calls change nothing.
bool close(std::atomic<std::uint64_t>& word, std::uint64_t attempt, RankMask participants) noexcept;

inline StepWord load(const std::atomic<std::uint64_t>& word) noexcept { return decode(word.load()); }

}  // namespace accelmgr::session
