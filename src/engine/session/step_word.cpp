#include "engine/session/step_word.hpp"

namespace accelmgr::session {
namespace {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(
    decode(encode(
        {.attempt = (1ull << 37) - 1, .index = 1, .closed = false, .abort = true, .mask = 0xffffff})) ==
    StepWord{.attempt = (1ull << 37) - 1, .index = 1, .closed = false, .abort = true, .mask = 0xffffff});

}  // namespace

std::uint64_t open(std::atomic<std::uint64_t>& word) noexcept {
  std::uint64_t seen = word.load();
  const StepWord now = decode(seen);
  if (!now.closed) return 0;
  const StepWord next{
      .attempt = now.attempt + 1, .index = now.index, .closed = false, .abort = false, .mask = 0};
  return word.compare_exchange_strong(seen, encode(next)) ? next.attempt : 0;
}

Vote vote(std::atomic<std::uint64_t>& word, std::uint64_t attempt, int rank, RankMask participants,
          bool may_commit) noexcept {
  std::uint64_t seen = word.load();
  for (;;) {
    StepWord w = decode(seen);
    if (w.attempt != attempt || !w.computing(participants)) return Vote::over;
    w.mask |= RankMask{1} << rank;
    if (w.mask == participants && !may_commit) return Vote::would_commit;
    if (word.compare_exchange_weak(seen, encode(w)))
      return w.mask == participants ? Vote::committed : Vote::counted;
  }
}

bool abort(std::atomic<std::uint64_t>& word, std::uint64_t attempt, std::uint32_t author,
           RankMask participants) noexcept {
  std::uint64_t seen = word.load();
  for (;;) {
    StepWord w = decode(seen);
    if (w.attempt != attempt || !w.computing(participants)) return false;
    w.abort = true;
    w.mask = author;
    if (word.compare_exchange_weak(seen, encode(w))) return true;
  }
}

bool close(std::atomic<std::uint64_t>& word, std::uint64_t attempt, RankMask participants) noexcept {
  std::uint64_t seen = word.load();
  StepWord w = decode(seen);
  if (w.attempt != attempt || w.closed || w.computing(participants)) return false;
  w.closed = true;
  if (!w.abort) w.index ^= 1;
  return word.compare_exchange_strong(seen, encode(w));
}

}  // namespace accelmgr::session
