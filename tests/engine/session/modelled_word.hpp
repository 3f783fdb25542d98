// The step word in models of protocols: its fields are in the model's State, and the real functions change
// it.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "engine/session/step_word.hpp"

namespace accelmgr::session {

template <class State>
StepWord word_of(const State& s) {
  return {s.word_attempt, s.word_index, s.word_closed != 0, s.word_abort != 0, s.word_mask};
}

/// Calls the real function `change` on the real word.
template <class State, class Change>
auto change_word(State& s, Change change) {
  std::atomic<std::uint64_t> real{encode(word_of(s))};
  const auto outcome = change(real);
  const auto word = load(real);
  s.word_attempt = word.attempt & 3;
  s.word_index = word.index & 1;
  s.word_closed = word.closed;
  s.word_abort = word.abort;
  s.word_mask = (word.abort ? author_host : word.mask) & 127;  // All authors are one: none matters.
  return outcome;
}

/// How the attempt stands.
inline std::string text_of(const StepWord& word, RankMask all) {
  return fmt::format("attempt {} {}", word.attempt,
                     word.closed           ? "closed   "
                     : word.abort          ? "aborted  "
                     : word.committed(all) ? "committed"
                                           : "computing");
}

}  // namespace accelmgr::session
