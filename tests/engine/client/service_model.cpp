// The service of the model, its runners, and faults.
#include "service_model.hpp"

namespace accelmgr::client::model {
namespace {

constexpr const char* runner_names[] = {"runner 0", "runner 1"};
constexpr const char* service_name = "service";
constexpr const char* nature = "-";

constexpr std::uint32_t bit_of(std::uint32_t attempt) { return attempt == 0 ? 0 : 1u << (attempt - 1); }

}  // namespace

State ServiceModel::initial() const {
  State s{};
  for (int rank = 0; rank < options_.ranks; ++rank) {
    s.runners[rank] = standing_at(Pc::idle);
    s.ranks[rank].ready = s.ranks[rank].pidfd_held = 1;
  }
  s.service = standing_at(Pc::watch);
  s.word_closed = 1;
  return s;
}

bool ServiceModel::runs(const State& s, const Process& host) const noexcept {
  return alive(host) && host.pc != Pc::home && host.stopped == 0 &&
         (host.job == Job::none || s.service.stopped == 0);
}

bool ServiceModel::attempts_left(const State& s) const noexcept {
  return s.word_attempt < static_cast<std::uint32_t>(options_.attempts);
}

int ServiceModel::living(const State& s) const noexcept {
  int count = 0;
  for (int rank = 0; rank < options_.ranks; ++rank) count += alive(s.runners[rank]);
  return count;
}

/// How many of the runners live whose pidfds the host holds.
int ServiceModel::seen_living(const State& s) const noexcept {
  int count = 0;
  for (int rank = 0; rank < options_.ranks; ++rank)
    count += s.ranks[rank].pidfd_held != 0 && alive(s.runners[rank]);
  return count;
}

bool ServiceModel::slices_finished(const State& s) const noexcept {
  for (int rank = 0; rank < options_.ranks; ++rank)
    if (s.ranks[rank].cursor_attempt != s.word_attempt || s.ranks[rank].finished == 0) return false;
  return true;
}

bool ServiceModel::whole_gradients(const State& s) const noexcept {
  for (int rank = 0; rank < options_.ranks; ++rank)
    if (s.ranks[rank].first != s.ranks[0].first || s.ranks[rank].second != s.ranks[0].first) return false;
  return true;
}

void ServiceModel::steps(const State& s, Steps& out) const {
  for (int rank = 0; rank < options_.ranks; ++rank)
    if (alive(s.runners[rank]) && s.runners[rank].stopped == 0) runner_steps(s, rank, out);
  if (alive(s.service) && s.service.stopped == 0) service_steps(s, out);
  for (int place = 0; place < 2; ++place)
    if (runs(s, s.hosts[place])) host_steps(s, place, out);
  fault_steps(s, out);
}

// ---- The attempt.

bool ServiceModel::abort_word(State& s, std::uint32_t attempt, std::uint32_t author) const {
  return change_word(s, [&](auto& word) { return session::abort(word, attempt, author, all()); });
}

// The real function looks before it closes. What it finds stays so until the attempt is closed, and close()
// changes no other attempt.
bool ServiceModel::close_if_over(State& s, std::uint32_t attempt) const {
  const auto word = word_of(s);
  if (word.attempt != attempt || word.closed || word.computing(all())) return false;
  if (!word.abort && !slices_finished(s)) return false;
  change_word(s, [&](auto& real) { return session::close(real, attempt, all()); });
  if (!word.abort) s.steps = (s.steps + 1) & 3;
  return true;
}

const char* ServiceModel::slice_step(State& s, Process& p, Pc afterwards) const {
  auto& rank = s.ranks[p.rank];
  const auto reduced = [&](std::uint32_t half) {
    if (s.accumulate == 0) return bit_of(p.attempt);
    if ((half & bit_of(p.attempt)) != 0) s.twice = 1;
    return half | bit_of(p.attempt);
  };
  switch (p.pc) {
    case Pc::slice_begin: {
      const bool begun = rank.cursor_attempt == p.attempt;
      if (begun && rank.finished != 0) return session::go_on(p, afterwards, "finds the slice finished");
      if (s.accumulate == 0) return session::go_on(p, Pc::reduce_first, "begins a slice that overwrites");
      if (begun && rank.in_flight != 0) {
        rank.first = rank.undo_first;
        rank.second = rank.undo_second;
        return session::go_on(p, Pc::reduce_first, "puts the image of the slice back");
      }
      rank.undo_first = rank.first;
      rank.undo_second = rank.second;
      return session::go_on(p, Pc::say_in_flight, "saves the image of the slice");
    }
    case Pc::say_in_flight:
      rank.in_flight = 1;
      return session::go_on(p, Pc::reduce_first, "says that the chunk is in flight");
    case Pc::reduce_first:
      rank.first = reduced(rank.first) & 7;
      return session::go_on(p, Pc::reduce_second, "reduces the first half");
    case Pc::reduce_second:
      rank.second = reduced(rank.second) & 7;
      return session::go_on(p, Pc::slice_end, "reduces the second half");
    case Pc::slice_end:
      rank.in_flight = 0;
      rank.finished = 1;
      rank.undo_first = rank.undo_second = 0;
      return session::go_on(p, afterwards, "says that the slice is finished");
    default:
      return nullptr;
  }
}

// ---- Runners.

void ServiceModel::runner_steps(const State& s, int rank, Steps& out) const {
  const auto& p = s.runners[rank];
  const auto word = word_of(s);
  const bool over = word.attempt != p.attempt || word.closed || word.abort;
  const auto add = session::steps_of_process(s, out, runner_names[rank],
                                             [rank](State& t) -> Process& { return t.runners[rank]; });
  switch (p.pc) {
    case Pc::starting: {
      auto& t = add("is ready");
      t.ranks[rank].ready = 1;
      t.ranks[rank].lost = 0;
      t.ranks[rank].acknowledged_attempt = s.word_attempt;
      t.runners[rank] = standing_at(Pc::idle);
      return;
    }
    case Pc::idle: {
      if (word.attempt <= s.ranks[rank].acknowledged_attempt) return;
      auto& t = add(word.closed ? "wakes after the attempt" : "begins the attempt",
                    word.closed ? Pc::acknowledge : Pc::compute);
      t.runners[rank].attempt = s.word_attempt;
      t.runners[rank].rank = static_cast<std::uint32_t>(rank) & 3;
      return;
    }
    case Pc::compute: {
      State t = s;
      auto& record = t.ranks[rank];
      record.cursor_attempt = p.attempt;
      record.in_flight = record.finished = 0;
      const auto vote =
          change_word(t, [&](auto& real) { return session::vote(real, p.attempt, rank, all()); });
      if (vote == session::Vote::committed) t.owed |= bit_of(p.attempt) & 7;
      go(t.runners[rank], Pc::await_votes);
      add(vote == session::Vote::committed ? "votes: committed"
          : vote == session::Vote::counted ? "votes"
                                           : "votes too late") = t;
      return;
    }
    case Pc::await_votes:
      if (word.attempt == p.attempt && word.committed(all()))
        add("sees the attempt committed", Pc::slice_begin);
      else if (over)
        add("sees the attempt over", Pc::acknowledge);
      return;
    case Pc::acknowledge: {
      const bool reduced = s.ranks[rank].cursor_attempt == p.attempt && s.ranks[rank].finished != 0;
      auto& t = add("acknowledges the attempt", Pc::close_after_slice);
      t.ranks[rank].acknowledged_attempt = p.attempt;
      if (!reduced) t.runners[rank] = standing_at(Pc::idle);
      return;
    }
    case Pc::close_after_slice: {
      State t = s;
      const bool closed = close_if_over(t, p.attempt);
      t.runners[rank] = standing_at(Pc::idle);
      add(closed ? "closes the attempt" : "finds nothing to close") = t;
      return;
    }
    default: {
      State t = s;
      const char* what = slice_step(t, t.runners[rank], Pc::acknowledge);
      add(what) = t;
      return;
    }
  }
}

// ---- The service.

void ServiceModel::watch_steps(const State& s, Steps& out) const {
  const auto word = word_of(s);
  for (int rank = 0; rank < options_.ranks; ++rank) {
    const auto& runner = s.runners[rank];
    const auto to_lost = [&](const char* what) {
      auto& t = out.add(s, service_name, what);
      t.ranks[rank].lost = 1;
      t.ranks[rank].ready = 0;
      t.service.rank = static_cast<std::uint32_t>(rank) & 3;
      go(t.service, Pc::lost_look);
    };
    if (!alive(runner) && s.ranks[rank].lost == 0) to_lost("sees a runner's death");
    if (runner.stopped != 0 && is(Mutation::stopped_runner_taken_for_dead) && s.ranks[rank].lost == 0 &&
        word.committed(all()))
      to_lost("takes a runner that is stopped for dead");
    if (!alive(runner) && s.ranks[rank].lost != 0 && word.closed) {
      auto& t = out.add(s, service_name, "starts a replacement");
      t.runners[rank] = standing_at(Pc::starting);
      t.ranks[rank].pidfd_held = 0;
    }
    if (runner.stopped != 0 && !options_.patient)
      out.add(s, service_name, "kills a runner that is stopped").runners[rank] = standing_at(Pc::dead);
  }
  watch_lease(s, out);
}

State& ServiceModel::admit(const State& s, Job job, const char* what, Steps& out) const {
  auto& t = out.add(s, service_name, what);
  const int place = alive(s.hosts[0]) ? 1 : 0;
  auto& host = t.hosts[place];
  host = standing_at(job == Job::save ? Pc::copy_first : Pc::look_at_marks);
  host.job = job;
  t.lease = host.lease = (1u + s.hosts_admitted + s.steps_asked_for + s.saves_asked_for) & 7;
  host.told = job == Job::none && s.half_written != 0;
  host.beside = job == Job::save && s.half_written != 0 && !is(Mutation::service_saves_half_over_good);
  t.driven = 1;
  t.holder = place & 1;
  t.has_detached = t.written_whole = t.stepped = t.wrote = 0;
  return t;
}

void ServiceModel::watch_lease(const State& s, Steps& out) const {
  const auto word = word_of(s);
  const auto& host = s.hosts[s.holder];
  const bool has_ended = host.pc == Pc::dead && !is(Mutation::lease_kept_by_the_dead);
  if (s.driven != 0) {
    const auto leaves = [&](const char* what, bool detached) {
      auto& t = out.add(s, service_name, what);
      t.driven = 0;
      t.leaving = 1;
      t.has_detached = detached || host.job != Job::none;
    };
    if (has_ended) leaves("sees that the host has ended", false);
    if (host.detached != 0) leaves("hears that the host detaches", true);
    if (host.closed != 0 && host.pc != Pc::dead) leaves("sees the host's socket closed", false);
    if (host.stopped != 0 && (is(Mutation::stopped_host_taken_for_gone) ||
                              (s.is_odd != 0 && is(Mutation::host_stopped_in_a_write_taken_for_gone))))
      leaves("takes a host that is stopped for gone", true);
  } else if (s.leaving != 0) {
    const bool is_gone =
        s.has_detached != 0 || host.pc == Pc::dead || is(Mutation::closed_socket_taken_for_gone);
    const bool can_close = word.closed || word.abort || word.computing(all()) || slices_finished(s);
    if (is_gone && (can_close || is(Mutation::next_host_before_the_attempt_is_closed))) {
      auto& t = out.add(s, service_name, "finds that the host is gone");
      t.service.attempt = s.word_attempt;
      go(t.service, Pc::leave_abort);
    }
  } else {
    if (s.hosts_admitted < static_cast<std::uint32_t>(options_.hosts)) {
      auto& t = admit(s, Job::none, "admits a host", out);
      t.hosts_admitted = (s.hosts_admitted + 1) & 3;
    }
    const bool may_step = s.half_written == 0 || is(Mutation::service_steps_on_half_written);
    if (options_.service_steps && s.steps_asked_for == 0 && may_step && attempts_left(s))
      admit(s, Job::step, "is asked for a step of its own", out).steps_asked_for = 1;
    if (s.saves_asked_for == 0) admit(s, Job::save, "makes a checkpoint", out).saves_asked_for = 1;
  }
}

// Lease::note_half_written(), then the lease is free.
void ServiceModel::settle(State& s) const {
  const auto& host = s.hosts[s.holder];
  const bool cleared = s.written_whole != 0 || (is(Mutation::mark_cleared_by_a_step) && s.stepped != 0) ||
                       (is(Mutation::mark_cleared_by_any_write) && s.wrote != 0);
  if (cleared) s.half_written = 0;
  if (host.job == Job::none && s.is_odd != 0) {
    if (!is(Mutation::half_written_not_noted)) s.half_written = 1;
    if (!is(Mutation::version_left_odd)) s.is_odd = 0;
  }
  if (cleared && is(Mutation::mark_cleared_by_an_earlier_write)) s.half_written = 0;
  s.lease = 0;
  s.leaving = s.has_detached = 0;
  s.owed = 0;  // A gradient whose host is gone may be overwritten.
  s.written_whole = s.stepped = s.wrote = 0;
  if (!alive(host) || host.pc == Pc::home) s.hosts[s.holder] = {};
}

void ServiceModel::service_steps(const State& s, Steps& out) const {
  const auto& p = s.service;
  const auto add =
      session::steps_of_process(s, out, service_name, [](State& t) -> Process& { return t.service; });
  switch (p.pc) {
    case Pc::watch:
      return watch_steps(s, out);
    case Pc::lost_look: {
      auto& t = add(s.word_closed != 0 ? "finds no attempt open" : "finds an attempt open", Pc::lost_abort);
      t.service.attempt = s.word_attempt;
      if (s.word_closed != 0) t.service = standing_at(Pc::watch);
      return;
    }
    case Pc::lost_abort: {
      State t = s;
      const bool aborted = abort_word(t, p.attempt, session::author_supervisor);
      go(t.service, Pc::lost_committed);
      if (aborted) t.service = standing_at(Pc::watch);
      add(aborted ? "aborts the attempt of the dead" : "cannot abort") = t;
      return;
    }
    case Pc::lost_committed: {
      const bool finish = s.word_attempt == p.attempt && word_of(s).committed(all()) &&
                          (s.driven != 0 || !is(Mutation::slice_of_the_dead_left_without_a_host));
      auto& t = add(finish ? "takes the slice of the dead over" : "has nothing to finish", Pc::slice_begin);
      if (!finish) t.service = standing_at(Pc::watch);
      return;
    }
    case Pc::lost_close: {
      auto& t = add("closes the attempt if it can");
      close_if_over(t, p.attempt);
      t.service = standing_at(Pc::watch);
      return;
    }
    case Pc::leave_abort: {
      auto& t = add("aborts the attempt of the host that is gone", Pc::leave_close);
      abort_word(t, p.attempt, session::author_supervisor);
      return;
    }
    case Pc::leave_close: {
      State t = s;
      if (!is(Mutation::aborted_attempt_of_the_gone_left_open)) close_if_over(t, p.attempt);
      t.service =
          standing_at(t.word_closed != 0 || is(Mutation::next_host_before_the_attempt_is_closed) ? Pc::settle
                                                                                                 : Pc::watch);
      // The real lease looks again and again. The model looks when there is something to see.
      add(t.word_closed != 0 ? "finds the attempt closed" : "finds the attempt open") = t;
      return;
    }
    case Pc::settle: {
      auto& t = add("settles what the host has left; the lease is free");
      settle(t);
      t.service = standing_at(Pc::watch);
      return;
    }
    default: {
      State t = s;
      const char* what = slice_step(t, t.service, Pc::lost_close);
      add(what) = t;
      return;
    }
  }
}

// ---- Faults.

// Threads of the service end with it.
void ServiceModel::end_service(State& s) const {
  s.service = standing_at(Pc::dead);
  for (auto& host : s.hosts)
    if (host.job != Job::none) host = {};
  s.driven = s.leaving = s.holder = s.has_detached = s.half_written = 0;
  s.hosts_admitted = s.steps_asked_for = s.saves_asked_for = 0;
  s.written_whole = s.stepped = s.wrote = 0;
}

void ServiceModel::fault_steps(const State& s, Steps& out) const {
  const auto fault = [&](const char* what) -> State& { return out.add(s, nature, what, true); };
  const auto death = [&](const char* what) -> State& {
    auto& t = fault(what);
    t.deaths = (s.deaths + 1) & 3;
    return t;
  };
  const bool may_die = s.deaths < static_cast<std::uint32_t>(options_.deaths);
  const bool may_stop = s.stops < static_cast<std::uint32_t>(options_.stops);
  const auto stop_or_continue = [&](const Process& p, const char* stops, const char* goes_on,
                                    const auto& place_in) {
    if (p.stopped != 0) {
      place_in(fault(goes_on)).stopped = 0;
    } else if (may_stop) {
      auto& t = fault(stops);
      t.stops = (s.stops + 1) & 3;
      place_in(t).stopped = 1;
    }
  };
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (!alive(s.runners[rank])) continue;
    if (may_die) death("a runner dies").runners[rank] = standing_at(Pc::dead);
    // The fork server ends with the service, and its children with it, also those that are stopped.
    if (!alive(s.service) && !is(Mutation::runners_outlive_the_service))
      out.add(s, nature, "a runner ends: the service is gone").runners[rank] = standing_at(Pc::dead);
    stop_or_continue(s.runners[rank], "a runner is stopped", "a runner goes on",
                     [rank](State& t) -> Process& { return t.runners[rank]; });
  }
  if (alive(s.service)) {
    if (may_die) end_service(death("the service dies"));
    stop_or_continue(s.service, "the service is stopped", "the service goes on",
                     [](State& t) -> Process& { return t.service; });
  }
  for (int place = 0; place < 2; ++place) {
    const auto& host = s.hosts[place];
    if (!alive(host) || host.pc == Pc::home || host.job != Job::none) continue;
    const auto in_state = [place](State& t) -> Process& { return t.hosts[place]; };
    const auto dead = [&](State& t) {
      t.hosts[place] = alive(s.service) ? standing_at(Pc::dead) : Process{};
    };
    if (may_die) dead(death("a host dies"));
    if (host.pc == Pc::lingers) dead(out.add(s, nature, "a host that has left ends"));
    stop_or_continue(host, "a host is stopped", "a host goes on", in_state);
  }
}

}  // namespace accelmgr::client::model
