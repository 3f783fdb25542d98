#include "protocol_model.hpp"

namespace accelmgr::session::model {
namespace {

constexpr const char* supervisor_name = "supervisor";
constexpr const char* host_name = "host";
constexpr const char* nature = "-";

}  // namespace

State ProtocolModel::initial() const {
  State s{};
  for (int rank = 0; rank < options_.ranks; ++rank) {
    s.runners[rank] = standing_at(Pc::idle);
    s.ranks[rank].state = number(RunnerState::ready);
    s.ranks[rank].pidfd_held = 1;
    forget_image(s.ranks[rank]);
  }
  s.supervisor = standing_at(Pc::watch);
  s.host = standing_at(Pc::gather);
  s.word_closed = 1;
  forget_attempt(s, options_.ranks);
  return s;
}

void ProtocolModel::steps(const State& s, Steps<State>& out) const {
  if (s.host.pc == Pc::done) return;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (!alive(s.runners[rank])) continue;
    const auto known = out.all().size();
    runner_steps(s, rank, out);
    if (options_.private_steps) continue;
    for (auto& step : out.all().subspan(known)) take_private_steps(step.to, rank);
  }
  if (alive(s.supervisor)) supervisor_steps(s, out);
  if (alive(s.host)) host_steps(s, out);
  death_steps(s, out);
}

// Joins steps of a runner to the step before them when no other process can see that step. Then no process
// can tell whether the runner stands before or after it, even if the runner dies there. Other processes do
// not read what a runner writes before its vote, the undo image of a chunk that is not in flight, or the
// result's copies before the cursor is at its end, or the image of an update that is not in flight. They do
// not change what a runner loads before it has acknowledged. An attempt that is over stays over, and a
// finished slice stays finished.
void ProtocolModel::take_private_steps(State& s, int rank) const {
  const auto is_private = [&](const Process& p) {
    return p.pc == Pc::reset_cursor || within(p, Pc::refuse, Pc::cast_vote) ||
           within(p, Pc::restore_state, Pc::acknowledge) || within(p, Pc::slice_begin, Pc::save_second) ||
           within(p, Pc::update_begin, Pc::update_compute) || within(p, Pc::begin_publish, Pc::end_publish) ||
           p.pc == Pc::close_scan || (p.pc == Pc::await_votes && over(s, p.attempt));
  };
  Steps<State> next;
  while (is_private(s.runners[rank])) {
    next.clear();
    runner_steps(s, rank, next);
    s = next.all().front().to;
  }
}

// ---- Supervisor.

void ProtocolModel::watch_steps(const State& s, Steps<State>& out) const {
  for (int rank = 0; rank < options_.ranks; ++rank) {
    const bool dead = !alive(s.runners[rank]);
    const bool known = s.ranks[rank].state == number(RunnerState::lost);
    if (dead && !known) {
      auto& t = out.add(s, supervisor_name, "sees a runner's death");
      t.ranks[rank].state = number(RunnerState::lost);
      t.supervisor.rank = static_cast<std::uint32_t>(rank) & 3;
      go(t.supervisor, Pc::lost_look);
    }
    if (dead && known && (s.word_closed != 0 || is(Mutation::replacement_before_the_attempt_is_closed))) {
      auto& t = out.add(s, supervisor_name, "sees that a replacement can be started");
      t.supervisor.rank = static_cast<std::uint32_t>(rank) & 3;
      go(t.supervisor, Pc::spawn);
    }
    const auto attempt = s.word_attempt;
    const bool not_updated = options_.updates && word_of(s).committed(all()) && all_reduced(s, attempt) &&
                             !is_updated(s.ranks[rank], attempt);
    if (dead && known && not_updated && !is(Mutation::update_of_the_dead_left)) {
      auto& t = out.add(s, supervisor_name, "takes the update of the dead over");
      t.supervisor.attempt = attempt;
      t.supervisor.rank = static_cast<std::uint32_t>(rank) & 3;
      go(t.supervisor, Pc::update_begin);
    }
    if (!dead && is(Mutation::slice_taken_from_the_living) && word_of(s).committed(all())) {
      auto& t = out.add(s, supervisor_name, "takes a runner that is only slow for dead");
      t.supervisor.rank = static_cast<std::uint32_t>(rank) & 3;
      go(t.supervisor, Pc::lost_look);
    }
  }
}

void ProtocolModel::supervisor_steps(const State& s, Steps<State>& out) const {
  const auto& p = s.supervisor;
  const auto add =
      steps_of_process(s, out, supervisor_name, [](State& t) -> Process& { return t.supervisor; });
  switch (p.pc) {
    case Pc::watch:
      return watch_steps(s, out);
    case Pc::lost_look: {
      auto& t = add(s.word_closed != 0 ? "finds no attempt open" : "finds an attempt open", Pc::lost_abort);
      t.supervisor.attempt = s.word_attempt;
      if (s.word_closed != 0) t.supervisor = standing_at(Pc::watch);
      return;
    }
    case Pc::lost_abort: {
      State t = s;
      const bool aborted = abort_word(t, p.attempt, author_supervisor);
      go(t.supervisor, Pc::lost_committed);
      if (aborted) t.supervisor = standing_at(Pc::watch);
      add(aborted ? "aborts the attempt of the dead" : "cannot abort") = t;
      return;
    }
    case Pc::lost_committed: {
      const bool finish = word_of(s).committed(all()) && !is(Mutation::slice_of_the_dead_left);
      auto& t = add(finish ? "takes the slice of the dead over" : "has nothing to finish", Pc::slice_begin);
      if (!finish) t.supervisor = standing_at(Pc::watch);
      return;
    }
    case Pc::spawn: {
      auto& t = add("starts a replacement");
      start_runner(t, p.rank);
      t.supervisor = standing_at(Pc::watch);
      return;
    }
    default: {
      State t = s;
      const char* what = slice_step(t, t.supervisor, Pc::close_look);
      if (what == nullptr) what = update_step(t, t.supervisor, Pc::close_look);
      if (what == nullptr) what = close_step(t, t.supervisor, Pc::watch);
      if (t.supervisor.pc == Pc::watch) t.supervisor = standing_at(Pc::watch);
      add(what) = t;
      return;
    }
  }
}

// ---- Host.

/// Whether the host takes a rank for lost: by the pidfd that it holds, or by the supervisor's record.
bool ProtocolModel::lost(const State& s, int rank) const noexcept {
  if (s.ranks[rank].state == number(RunnerState::lost)) return true;
  if (is(Mutation::replacement_whose_pidfd_nobody_holds)) return !alive(s.runners[rank]);
  return s.ranks[rank].pidfd_held == 0 || !alive(s.runners[rank]);
}
void ProtocolModel::wait_steps(const State& s, Steps<State>& out) const {
  const auto word = word_of(s);
  const auto move = [&](const char* what, Pc to) { go(out.add(s, host_name, what).host, to); };
  if (word.abort) return move("sees the attempt aborted", word.closed ? Pc::give_result : Pc::close_look);
  if (word.closed && is(Mutation::host_changes_what_is_applied)) {
    auto& t = out.add(s, host_name, "sees the attempt closed, and zeroes the gradients");
    for (auto& rank : t.ranks) rank.master = 0;
    return go(t.host, Pc::await_applied);
  }
  if (word.closed)
    return move("sees the attempt closed", options_.inner ? Pc::await_applied : Pc::give_result);
  if (!alive(s.supervisor)) move("sees the manager's death", Pc::end_all);
  if (word.committed(all())) {
    if (!options_.patient) move("has waited too long for the reduction", Pc::end_all);
    return;
  }
  bool any_lost = false;
  for (int rank = 0; rank < options_.ranks; ++rank) any_lost = any_lost || lost(s, rank);
  if (any_lost) move("sees a runner's death", Pc::abort_lost);
  if (!options_.patient) move("has reached the deadline", Pc::abort_timeout);
}

// It does not wait for the dead, and others wait for it.
void ProtocolModel::await_applied_steps(const State& s, Steps<State>& out) const {
  bool all_have = true;
  bool any_lost = !alive(s.supervisor);
  for (int rank = 0; rank < options_.ranks; ++rank) {
    all_have = all_have && s.ranks[rank].acknowledged_attempt >= s.host.attempt;
    any_lost = any_lost || lost(s, rank);
  }
  const auto move = [&](const char* what) { go(out.add(s, host_name, what).host, Pc::give_result); };
  if (all_have) return move("sees that all runners have applied");
  if (any_lost) move("waits for no update: a process is lost");
  if (!options_.patient) move("is interrupted while runners apply");
}

// The manager is dead, or nothing moves: only the host is left to finish.
void ProtocolModel::end_steps(const State& s, Steps<State>& out) const {
  const auto& p = s.host;
  const auto add = steps_of_process(s, out, host_name, [](State& t) -> Process& { return t.host; });
  switch (p.pc) {
    case Pc::end_all: {
      auto& t = add("kills manager and runners, waits for their pidfds", Pc::end_abort);
      t.supervisor = standing_at(Pc::dead);
      for (int rank = 0; rank < options_.ranks; ++rank)
        if (!is(Mutation::host_finishes_beside_living_runners)) end_runner(t, rank);
      return;
    }
    case Pc::end_abort: {
      State t = s;
      const bool aborted = abort_word(t, p.attempt, author_host);
      go(t.host, Pc::end_look);
      add(aborted ? "aborts" : "cannot abort") = t;
      return;
    }
    case Pc::end_look: {
      const bool committed = word_of(s).committed(all());
      auto& t = add(committed ? "finds the attempt committed" : "finds nothing committed",
                    committed ? Pc::slice_begin : Pc::close_look);
      t.host.rank = 0;
      return;
    }
    case Pc::next_slice:
    case Pc::next_update: {
      const bool slice = p.pc == Pc::next_slice;
      const bool last = p.rank + 1u == static_cast<std::uint32_t>(options_.ranks);
      const auto next = slice ? Pc::slice_begin : Pc::update_begin;
      const auto after_last = slice && options_.updates ? Pc::update_begin : Pc::close_look;
      add(slice ? "goes to the next slice" : "goes to the next update", last ? after_last : next).host.rank =
          last ? 0 : (p.rank + 1) & 15;
      return;
    }
    default: {  // recover
      auto& t = add("starts a new manager over the session");
      t.supervisor = standing_at(Pc::watch);
      for (int rank = 0; rank < options_.ranks; ++rank) start_runner(t, static_cast<std::uint32_t>(rank));
      t.host = standing_at(Pc::gather);
      return;
    }
  }
}

void ProtocolModel::host_steps(const State& s, Steps<State>& out) const {
  const auto& p = s.host;
  const auto add = steps_of_process(s, out, host_name, [](State& t) -> Process& { return t.host; });
  switch (p.pc) {
    case Pc::gather: {
      if (!alive(s.supervisor)) {
        auto& t = add("sees the manager's death");
        t.host = standing_at(Pc::end_all);
        t.host.attempt = s.word_attempt;
      }
      const auto& rank = s.ranks[p.rank];
      if (rank.state != number(RunnerState::ready) || rank.acknowledged_attempt < s.word_attempt) return;
      auto& t = add("finds a runner ready, holds its pidfd");
      t.ranks[p.rank].pidfd_held = alive(s.runners[p.rank]);
      if (++t.host.rank == static_cast<std::uint32_t>(options_.ranks)) t.host = standing_at(Pc::open_word);
      return;
    }
    case Pc::open_word: {
      State t = s;
      const auto attempt = change_word(t, [](auto& word) { return open(word); });
      t.refused_to_open = attempt == 0;
      t.host.attempt = attempt & 3;
      go(t.host, Pc::wait);
      add("opens an attempt") = t;
      return;
    }
    case Pc::wait:
      return wait_steps(s, out);
    case Pc::await_applied:
      return await_applied_steps(s, out);
    case Pc::abort_lost:
    case Pc::abort_timeout: {
      State t = s;
      const auto author = p.pc == Pc::abort_lost ? author_supervisor : author_host;
      const bool aborted = abort_word(t, p.attempt, author);
      go(t.host, Pc::wait);
      add(aborted ? "aborts" : "cannot abort any more") = t;
      return;
    }
    case Pc::give_result: {
      auto& t = add("returns from the step");
      bool any = alive(s.supervisor);
      for (const auto& runner : s.runners) any = any || alive(runner);
      t.host = standing_at(s.word_attempt == attempts ? Pc::done : any ? Pc::gather : Pc::recover);
      return;
    }
    case Pc::done:
      return;
    default: {
      if (within(p, Pc::end_all, Pc::recover)) return end_steps(s, out);
      State t = s;
      const char* what = slice_step(t, t.host, Pc::next_slice);
      if (what == nullptr) what = update_step(t, t.host, Pc::next_update);
      if (what == nullptr) what = close_step(t, t.host, Pc::give_result);
      add(what) = t;
      return;
    }
  }
}

// ---- Deaths.

void ProtocolModel::death_steps(const State& s, Steps<State>& out) const {
  const bool more = s.deaths < static_cast<std::uint32_t>(options_.deaths);
  const auto death = [&](const char* what) -> State& {
    auto& t = out.add(s, nature, what, true);
    t.deaths = (s.deaths + 1) & 3;
    return t;
  };
  int living = 0;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (!alive(s.runners[rank])) continue;
    ++living;
    if (more) end_runner(death("a runner dies"), rank);
    // When the manager is dead, its runners end one after the other.
    if (!alive(s.supervisor))
      end_runner(out.add(s, nature, "a runner ends: the manager is gone", true), rank);
  }
  if (!more) return;
  if (living > 1) {
    auto& t = death("the fork server dies, and all runners with it");
    for (int rank = 0; rank < options_.ranks; ++rank) end_runner(t, rank);
  }
  if (alive(s.supervisor)) death("the manager dies").supervisor = standing_at(Pc::dead);
  if (alive(s.host) && options_.host_dies) death("the host dies").host = standing_at(Pc::dead);
}

}  // namespace accelmgr::session::model
