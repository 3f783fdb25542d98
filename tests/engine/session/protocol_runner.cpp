// The runner of the model: its start, and its attempt up to the slice.
#include "protocol_model.hpp"

namespace accelmgr::session::model {
namespace {

constexpr const char* runner_names[] = {"runner 0", "runner 1", "runner 2"};

}  // namespace

void ProtocolModel::start_steps(const State& s, int rank, Steps<State>& out) const {
  const auto add =
      steps_of_process(s, out, runner_names[rank], [rank](State& t) -> Process& { return t.runners[rank]; });
  switch (s.runners[rank].pc) {
    case Pc::look_at_index:
      add("starts: looks which copies are valid", Pc::load_copies).runners[rank].index = s.word_index;
      return;
    case Pc::load_copies: {
      auto& t = add("starts: loads the copies");
      t.ranks[rank].work = cell(s.ranks[rank].copies, s.runners[rank].index);
      t.runners[rank] = standing_at(Pc::mark_acknowledged);
      return;
    }
    case Pc::mark_acknowledged:
      add("starts: has acknowledged whatever was before", Pc::mark_ready).ranks[rank].acknowledged_attempt =
          s.word_attempt;
      return;
    default:
      add("is ready", Pc::idle).ranks[rank].state = number(RunnerState::ready);
      return;
  }
}

void ProtocolModel::compute_steps(const State& s, int rank, Steps<State>& out) const {
  const auto attempt = s.runners[rank].attempt;
  const auto computed = [&](const char* what, Pc next) {
    auto& t = out.add(s, runner_names[rank], what);
    t.ranks[rank].slab = attempt & 3;
    t.ranks[rank].work = one_more(s.ranks[rank].work) & 3;
    go(t.runners[rank], next);
  };
  const bool lacks_steps = options_.inner && s.runners[rank].applied != s.committed;
  if (!lacks_steps || is(Mutation::replacement_without_the_steps_before))
    computed("computes its gradients", Pc::look_before_vote);
  if (over(s, attempt)) computed("stops computing: the attempt is over", Pc::await_votes);
  computed("finds a reason to refuse", Pc::refuse);
}

void ProtocolModel::vote_steps(const State& s, int rank, Steps<State>& out) const {
  const auto& p = s.runners[rank];
  const bool vote_first = is(Mutation::vote_before_the_copies_are_written);
  const auto add =
      steps_of_process(s, out, runner_names[rank], [rank](State& t) -> Process& { return t.runners[rank]; });
  switch (p.pc) {
    case Pc::look_before_vote: {
      if (over(s, p.attempt)) {
        add("does not vote: the attempt is over", Pc::await_votes);
        return;
      }
      auto& t = add("looks which copies are the others", vote_first ? Pc::cast_vote : Pc::begin_copies);
      t.runners[rank].index = (s.word_index ^ 1u) & 1;
      return;
    }
    case Pc::begin_copies:
      add("begins to write its copies", Pc::end_copies).ranks[rank].copies =
          with_cell(s.ranks[rank].copies, p.index, torn) & 15;
      return;
    case Pc::end_copies: {
      auto& t = add("has written its copies", vote_first ? Pc::await_votes : Pc::cast_vote);
      t.ranks[rank].copies = with_cell(s.ranks[rank].copies, p.index, s.ranks[rank].work) & 15;
      t.runners[rank].index = 0;
      return;
    }
    default: {  // cast_vote
      State t = s;
      const auto vote_is = change_word(t, [&](auto& real) { return vote(real, p.attempt, rank, all()); });
      if (vote_is == Vote::committed) t.committed = one_more(s.committed) & 3;
      go(t.runners[rank], vote_first ? Pc::begin_copies : Pc::await_votes);
      add(vote_is == Vote::committed ? "votes: committed"
          : vote_is == Vote::counted ? "votes"
                                     : "votes too late") = t;
      return;
    }
  }
}

void ProtocolModel::runner_steps(const State& s, int rank, Steps<State>& out) const {
  const auto& p = s.runners[rank];
  const auto word = word_of(s);
  const auto add =
      steps_of_process(s, out, runner_names[rank], [rank](State& t) -> Process& { return t.runners[rank]; });
  const auto move = [&](const char* what, Pc to) { add(what, to); };
  switch (p.pc) {
    case Pc::idle: {
      if (word.attempt <= s.ranks[rank].acknowledged_attempt) return;
      auto& t =
          add(word.closed ? "wakes after the attempt" : "begins the attempt", !word.closed ? Pc::reset_cursor
                                                                              : word.abort ? Pc::restore_state
                                                                                           : Pc::acknowledge);
      t.runners[rank].attempt = s.word_attempt;
      t.runners[rank].rank = static_cast<std::uint32_t>(rank) & 3;
      return;
    }
    case Pc::reset_cursor: {
      auto& t = add("resets its cursor", Pc::compute);
      store_cursor(t.ranks[rank], {.attempt = p.attempt});
      return;
    }
    case Pc::compute:
      return compute_steps(s, rank, out);
    case Pc::refuse: {
      auto& t = add("refuses", Pc::await_votes);
      abort_word(t, p.attempt, static_cast<std::uint32_t>(rank));
      return;
    }
    case Pc::await_votes:
      if (word.attempt == p.attempt && word.committed(all()))
        return move("sees the attempt committed", Pc::slice_begin);
      if (!over(s, p.attempt)) return;
      return move("sees the attempt over", word.attempt == p.attempt && word.closed && !word.abort
                                               ? Pc::acknowledge
                                               : Pc::restore_state);
    case Pc::restore_state: {
      auto& t = add("goes back to the state of the valid copies", Pc::acknowledge);
      if (!is(Mutation::state_kept_after_an_abort))
        t.ranks[rank].work = cell(s.ranks[rank].copies, s.word_index);
      return;
    }
    case Pc::acknowledge:
    case Pc::acknowledge_and_close: {
      auto& t = add("acknowledges the attempt");
      t.ranks[rank].acknowledged_attempt = p.attempt & 3;
      t.runners[rank] = standing_at(p.pc == Pc::acknowledge ? Pc::idle : Pc::close_look, p);
      if (p.pc == Pc::acknowledge_and_close) t.runners[rank].attempt = p.attempt;
      return;
    }
    case Pc::await_reduced:
      if (all_reduced(s, p.attempt)) move("sees that all slices are reduced", Pc::update_begin);
      return;
    default:
      break;
  }
  if (p.pc < Pc::idle) return start_steps(s, rank, out);
  if (within(p, Pc::look_before_vote, Pc::cast_vote)) return vote_steps(s, rank, out);
  if (within(p, Pc::await_closed, Pc::apply_second)) return apply_steps(s, rank, out);
  const bool early = is(Mutation::applied_before_the_attempt_is_closed);
  const auto done = !options_.inner ? Pc::acknowledge_and_close : early ? Pc::apply_first : Pc::close_look;
  const bool waits = !is(Mutation::update_before_all_slices_are_reduced);
  const auto reduced = !options_.updates ? done : waits ? Pc::await_reduced : Pc::update_begin;
  State t = s;
  const char* what = slice_step(t, t.runners[rank], reduced);
  if (what == nullptr) what = update_step(t, t.runners[rank], done);
  if (what == nullptr)
    what = close_step(t, t.runners[rank], options_.inner && !early ? Pc::await_closed : Pc::idle);
  if (t.runners[rank].pc == Pc::idle) t.runners[rank] = standing_at(Pc::idle, p);
  add(what) = t;
}

// What it reads counts as wrong unless it has all commits, and nothing else.
void ProtocolModel::apply_steps(const State& s, int rank, Steps<State>& out) const {
  const auto& p = s.runners[rank];
  const auto add =
      steps_of_process(s, out, runner_names[rank], [rank](State& t) -> Process& { return t.runners[rank]; });
  const auto is_whole = [&](std::uint32_t half) {
    for (int r = 0; r < options_.ranks; ++r)
      for (int chunk = 0; chunk < options_.chunks; ++chunk)
        if (cell(s.ranks[r].master, 2 * static_cast<std::uint32_t>(chunk) + half) != s.committed)
          return false;
    return true;
  };
  switch (p.pc) {
    case Pc::await_closed:
      if (s.word_closed != 0) add("sees that the mean is whole", Pc::apply_first);
      return;
    case Pc::apply_first:
      add("reads the first halves of the mean", Pc::apply_second).runners[rank].restore = is_whole(0) ? 0 : 1;
      return;
    default: {  // apply_second
      const bool closes = is(Mutation::applied_before_the_attempt_is_closed);
      auto& t = add("reads the second halves, and applies the mean",
                    closes ? Pc::acknowledge_and_close : Pc::acknowledge);
      t.runners[rank].applied = p.restore == 0 && is_whole(1) ? one_more(p.applied) & 3 : torn;
      t.runners[rank].restore = 0;
      return;
    }
  }
}

}  // namespace accelmgr::session::model
