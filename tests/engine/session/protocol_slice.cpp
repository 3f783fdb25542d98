// What all kinds of processes in the model do: abort an attempt, reduce a slice, close.
#include "protocol_model.hpp"

namespace accelmgr::session::model {

bool ProtocolModel::abort_word(State& s, std::uint32_t attempt, std::uint32_t author) const {
  return change_word(s, [&](auto& word) {
    const bool too_late = is(Mutation::abort_of_a_committed_attempt) && load(word).committed(all());
    return abort(word, attempt, author, too_late ? ~RankMask{0} : all());
  });
}

void ProtocolModel::reduce_half(State& s, const Process& p, std::uint32_t half) const {
  auto& rank = s.ranks[p.rank];
  const auto at = p.chunk * 2 + half;
  auto sum = one_more(cell(rank.master, at));
  for (int other = 0; other < options_.ranks; ++other)
    if (s.ranks[other].slab != p.attempt) sum = torn;  // The slab was overwritten before the closing.
  rank.master = with_cell(rank.master, at, sum) & 255;
}

const char* ProtocolModel::slice_step(State& s, Process& p, Pc afterwards) const {
  auto& rank = s.ranks[p.rank];
  const bool in_flight_first = is(Mutation::in_flight_before_the_image_is_saved);
  const auto chunks = static_cast<std::uint32_t>(options_.chunks);
  const auto next_chunk = [&] {
    if (p.chunk < chunks) return in_flight_first ? Pc::say_in_flight : Pc::save_first;
    return p.rank == 0 ? Pc::begin_publish : Pc::slice_end;
  };
  const auto save = [&](std::uint32_t half) {
    const auto at = p.chunk * 2 + half;
    if (p.restore != 0) {
      rank.master = with_cell(rank.master, at, cell(rank.undo, half)) & 255;
    } else {
      rank.undo = with_cell(rank.undo, half, cell(rank.master, at)) & 15;
    }
  };
  const auto other = s.word_index ^ 1u;
  switch (p.pc) {
    case Pc::slice_begin: {
      const auto cursor = cursor_of(rank);
      if (cursor.attempt == p.attempt && cursor.chunk == cursor_finished)
        return go_on(p, afterwards, "finds the slice finished");
      const bool begun = cursor.attempt == p.attempt;
      p.chunk = begun ? cursor.chunk & 3 : 0;
      p.restore = begun && cursor.in_flight && !is(Mutation::recovery_without_undo);
      return go_on(p, next_chunk(), "begins a slice where its cursor stands");
    }
    case Pc::save_first:
      save(0);
      return go_on(
          p, Pc::save_second,
          p.restore != 0 ? "puts the first half of the image back" : "saves the first half of the image");
    case Pc::save_second:
      save(1);
      return go_on(
          p, in_flight_first ? Pc::reduce_first : Pc::say_in_flight,
          p.restore != 0 ? "puts the second half of the image back" : "saves the second half of the image");
    case Pc::say_in_flight:
      store_cursor(rank, {p.attempt, p.chunk, true});
      return go_on(p, in_flight_first ? Pc::save_first : Pc::reduce_first,
                   "says that the chunk is in flight");
    case Pc::reduce_first:
      reduce_half(s, p, 0);
      return go_on(p, Pc::reduce_second, "reduces the first half of the chunk");
    case Pc::reduce_second:
      reduce_half(s, p, 1);
      return go_on(p, Pc::move_on, "reduces the second half of the chunk");
    case Pc::move_on:
      ++p.chunk;
      p.restore = 0;
      store_cursor(rank, {p.attempt, p.chunk, false});
      forget_image(rank);
      return go_on(p, next_chunk(), "moves the cursor on");
    case Pc::begin_publish:
      s.counters = with_cell(s.counters, other, torn) & 15;
      s.result = with_cell(s.result, other, torn) & 15;
      return go_on(p, Pc::end_publish, "begins to write counters and result");
    case Pc::end_publish:
      s.counters = with_cell(s.counters, other, one_more(cell(s.counters, s.word_index))) & 15;
      s.result = with_cell(s.result, other, cell(s.ranks[0].copies, other)) & 15;
      return go_on(p, Pc::slice_end, "has written counters and result");
    case Pc::slice_end:
      store_cursor(rank, {p.attempt, cursor_finished, false});
      p.chunk = 0;
      return go_on(p, afterwards, "says that the slice is finished");
    default:
      return nullptr;
  }
}

bool ProtocolModel::all_reduced(const State& s, std::uint32_t attempt) const {
  for (int rank = 0; rank < options_.ranks; ++rank)
    if (!is_reduced(s.ranks[rank], attempt)) return false;
  return true;
}

const char* ProtocolModel::update_step(State& s, Process& p, Pc afterwards) const {
  auto& rank = s.ranks[p.rank];
  const bool in_flight_first = is(Mutation::update_in_flight_before_the_image_is_written);
  const auto copy = [&](std::uint32_t half) {
    rank.updated = with_cell(rank.updated, half, cell(rank.update_image, half)) & 15;
  };
  switch (p.pc) {
    case Pc::update_begin: {
      if (is_updated(rank, p.attempt))
        return go_on(p, afterwards, "finds the parameters of the slice updated");
      const bool in_flight = rank.update_attempt == p.attempt && rank.update_in_flight != 0;
      return go_on(p,
                   in_flight && !is(Mutation::update_computed_again) ? Pc::copy_first
                   : in_flight_first                                 ? Pc::update_in_flight
                                                                     : Pc::update_compute,
                   "begins an update where its cursor stands");
    }
    case Pc::update_compute: {
      bool whole = true;
      for (int other = 0; other < options_.ranks; ++other)
        for (std::uint32_t half = 0; half < 2u * static_cast<std::uint32_t>(options_.chunks); ++half)
          whole = whole && cell(s.ranks[other].master, half) == s.committed;
      for (const std::uint32_t half : {0u, 1u})
        rank.update_image =
            with_cell(rank.update_image, half, whole ? one_more(cell(rank.updated, half)) : torn) & 15;
      return go_on(p, in_flight_first ? Pc::copy_first : Pc::update_in_flight,
                   "writes new values to the image");
    }
    case Pc::update_in_flight:
      rank.update_attempt = p.attempt & 3;
      rank.update_in_flight = 1;
      rank.update_finished = 0;
      return go_on(p, in_flight_first ? Pc::update_compute : Pc::copy_first,
                   "says that the update is in flight");
    case Pc::copy_first:
      copy(0);
      return go_on(p, Pc::copy_second, "copies the first half of the image");
    case Pc::copy_second:
      copy(1);
      return go_on(p, Pc::update_end, "copies the second half of the image");
    case Pc::update_end:
      rank.update_in_flight = 0;
      rank.update_finished = 1;
      rank.update_image = 15;
      return go_on(p, afterwards, "says that the slice is updated");
    default:
      return nullptr;
  }
}

const char* ProtocolModel::close_step(State& s, Process& p, Pc afterwards) const {
  const auto word = word_of(s);
  switch (p.pc) {
    case Pc::close_look: {
      const bool to_close = word.attempt == p.attempt && !word.closed && !word.computing(all());
      p.rank = 0;
      const bool scan = !word.abort && !is(Mutation::close_before_all_slices_are_finished);
      return go_on(p,
                   !to_close ? afterwards
                   : scan    ? Pc::close_scan
                             : Pc::close_word,
                   to_close ? "finds an attempt to close" : "finds nothing to close");
    }
    case Pc::close_scan: {
      const bool looks_at_updates = options_.updates && !is(Mutation::close_before_all_slices_are_updated);
      const auto& rank = s.ranks[p.rank];
      if (!is_reduced(rank, p.attempt) || (looks_at_updates && !is_updated(rank, p.attempt)))
        return go_on(p, afterwards, "finds a slice that is not finished");
      const bool last = ++p.rank == static_cast<std::uint32_t>(options_.ranks);
      return go_on(p, last ? Pc::close_word : Pc::close_scan, "finds a slice finished");
    }
    case Pc::close_word: {
      const bool closed = change_word(s, [&](auto& real) { return close(real, p.attempt, all()); });
      if (closed && word.abort && is(Mutation::abort_flips_the_index)) s.word_index ^= 1u;
      if (closed) forget_attempt(s, options_.ranks);
      return go_on(p, afterwards, closed ? "closes the attempt" : "closes nothing: somebody else did");
    }
    default:
      return nullptr;
  }
}

}  // namespace accelmgr::session::model
