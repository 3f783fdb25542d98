// The promises that the model checks in every state.
#include <fmt/format.h>

#include "protocol_model.hpp"

namespace accelmgr::session::model {

bool ProtocolModel::may_rest(const State& s) const { return !alive(s.host) || s.host.pc == Pc::done; }

const char* ProtocolModel::wrong(const State& s) const {
  const auto word = word_of(s);
  const bool committed = word.committed(all());
  // A committed attempt must be visible from its closing on. Until then each of its parts may be there or
  // not.
  const auto counted = s.committed - (committed ? 1u : 0u);
  if (s.refused_to_open != 0) return "never lost: the host could not open an attempt";
  if (!word.closed && (s.host.pc == Pc::give_result || s.host.pc == Pc::gather))
    return "never lost: the step ends before its attempt is closed";
  if (cell(s.counters, word.index) != counted)
    return "never lost: the valid counters are not those of the commits";
  if (cell(s.result, word.index) != counted) return "never lost: the valid result is not that of the commits";
  for (int r = 0; r < options_.ranks; ++r) {
    const auto& rank = s.ranks[r];
    const auto cursor = cursor_of(rank);
    const bool finished = committed && cursor.attempt == word.attempt && cursor.chunk == cursor_finished;
    for (std::uint32_t half = 0; half < 2u * static_cast<std::uint32_t>(options_.chunks); ++half) {
      if (cell(rank.master, half) > s.committed) return "never twice: a slice holds more than was committed";
      const bool is_the_hosts = options_.inner && word.closed;  // Nobody but runners that apply it need it.
      if (!is_the_hosts && cell(rank.master, half) < (finished ? s.committed : counted))
        return "never lost: a slice holds less than was committed";
    }
    for (const std::uint32_t half : {0u, 1u}) {
      if (!options_.updates) break;
      const bool updated = committed && is_updated(rank, word.attempt);
      if (cell(rank.updated, half) > s.committed)
        return "never twice: parameters hold more than was committed";
      if (cell(rank.updated, half) < (updated ? s.committed : counted))
        return "never lost: parameters hold less than was committed";
    }
    if (cell(rank.copies, word.index) != counted) return "valid copies: not those of the commits";
    if (committed && cell(rank.copies, word.index ^ 1) != s.committed)
      return "valid copies: committed before they are complete";
    const auto& runner = s.runners[r];
    if (options_.inner && runner.applied == torn)
      return "never lost: a runner applies a mean that is not whole";
    const bool votes =
        runner.pc == Pc::begin_copies || runner.pc == Pc::end_copies || runner.pc == Pc::cast_vote;
    if (options_.inner && votes && runner.applied != s.committed)
      return "never lost: a runner votes that lacks a step";
    if (runner.pc == Pc::idle && word.closed && rank.acknowledged_attempt == word.attempt &&
        rank.work != s.committed)
      return "no trace: a runner's working state is not that of the commits";
  }
  return nullptr;
}

std::string ProtocolModel::text(const State& s) const {
  const auto word = word_of(s);
  std::string text = text_of(word, all()) + fmt::format(" index {} |", word.index);
  for (int r = 0; r < options_.ranks; ++r) {
    const auto& rank = s.ranks[r];
    text += fmt::format(" master");
    for (std::uint32_t half = 0; half < 2u * static_cast<std::uint32_t>(options_.chunks); ++half)
      text += fmt::format(" {}", cell(rank.master, half));
    text += fmt::format(" cursor {}.{}{} copies {}{} applied {} updated {}{}{} |", +rank.cursor_attempt,
                        +rank.cursor_chunk, rank.cursor_in_flight != 0 ? "*" : " ", cell(rank.copies, 0),
                        cell(rank.copies, 1), +s.runners[r].applied, cell(rank.updated, 0),
                        cell(rank.updated, 1), rank.update_in_flight != 0 ? "*" : " ");
  }
  return text;
}

}  // namespace accelmgr::session::model
