// The hosts of the model, and the threads of the service that make steps and checkpoints.
#include "engine/client/left_gradients.hpp"
#include "engine/client/next_action.hpp"
#include "service_model.hpp"

namespace accelmgr::client::model {
namespace {

constexpr const char* host_name = "host";
constexpr const char* own_name = "own thread";

const char* name_of(const Process& host) { return host.job == Job::none ? host_name : own_name; }

LeftGradients left_of(const Process& host) { return static_cast<LeftGradients>(host.left); }

/// Where a host goes that makes no more steps. A thread of the service keeps its mappings.
Pc leave_from(const Process& host) { return host.job == Job::none ? Pc::give_up_mappings : Pc::say_detach; }

}  // namespace

void ServiceModel::host_steps(const State& s, int place, Steps& out) const {
  const auto& p = s.hosts[place];
  const auto add =
      session::steps_of_process(s, out, name_of(p), [place](State& t) -> Process& { return t.hosts[place]; });
  const auto within = [&](Pc first, Pc last) { return p.pc >= first && p.pc <= last; };
  if (p.pc == Pc::wait) return wait_steps(s, place, out);
  if (within(Pc::found, Pc::has_written)) return choose_steps(s, place, out);
  if (within(Pc::assemble, Pc::mark_overwritten)) return attempt_steps(s, place, out);
  if (within(Pc::make_odd, Pc::make_even)) return write_steps(s, place, out);
  if (within(Pc::mark_given_up, Pc::mark_zeroed)) return zero_steps(s, place, out);
  switch (p.pc) {
    case Pc::look_at_marks: {  // Handle::State::attach(), or service::step().
      auto& t = add("looks what gradients were left");
      auto& host = t.hosts[place];
      const auto left = left_by(s.steps, s.zeroed_step, s.applied_step);
      const bool applied = left == LeftGradients::applied;
      if (host.job == Job::step) {
        host.accumulate = !applied || is(Mutation::service_adds_to_the_applied);
        go(host, Pc::assemble);
        return;
      }
      host.left = static_cast<std::uint32_t>(left) & 3;
      host.overwrites =
          left != LeftGradients::none && !(applied && is(Mutation::first_step_adds_to_the_applied));
      go(host, Pc::found);
      return;
    }
    case Pc::give_up_mappings:
      add("gives up its mappings", Pc::say_detach);
      return;
    case Pc::say_detach: {
      auto& t = add("detaches");
      t.hosts[place] = standing_at(Pc::home);
      t.hosts[place].detached = 1;
      t.hosts[place].job = p.job;
      if (!alive(s.service)) t.hosts[place] = {};
      return;
    }
    case Pc::lingers:
      return;
    case Pc::copy_first:
      add("copies the first half of the parameters", Pc::copy_second).hosts[place].copied =
          s.parameters_first;
      return;
    case Pc::copy_second: {
      auto& t = add(p.beside != 0 ? "copies the second half, and saves beside the good checkpoint"
                                  : "copies the second half, and saves",
                    Pc::say_detach);
      if (p.beside == 0 && p.copied != s.parameters_second) t.save_of_half = 1;
      t.hosts[place].copied = 0;
      return;
    }
    default:
      return end_steps(s, place, out);
  }
}

// What a host does between two steps. It applies no gradient twice by its own will, and none that it was not
// told of as unapplied.
void ServiceModel::choose_steps(const State& s, int place, Steps& out) const {
  const auto& p = s.hosts[place];
  const auto choose = [&](const char* what, Pc to) -> Process& {
    auto& host = out.add(s, name_of(p), what).hosts[place];
    go(host, to);
    return host;
  };
  const auto make_step = [&](const char* what, bool accumulate) -> Process& {
    auto& host = choose(what, Pc::assemble);
    host.accumulate = accumulate;
    return host;
  };
  const bool more = attempts_left(s);
  choose("makes no more steps", leave_from(p));
  if (p.pc == Pc::found) {
    const bool unapplied = left_of(p) == LeftGradients::unapplied;
    if (more) make_step("makes its first step", true);
    if (more && unapplied) make_step("adds a step to the gradients that were left", true).overwrites = 0;
    if (unapplied) choose("applies the gradients that were left", Pc::make_odd).whole = 0;
    if (left_of(p) != LeftGradients::none) choose("zeroes the gradients that were left", Pc::mark_given_up);
    if (p.told != 0) {
      auto& host = choose("writes all parameters anew", Pc::make_odd);
      host.whole = 1;
      host.told = 0;
    }
    return;
  }
  if (p.pc == Pc::has_gradients) {
    if (more) make_step("makes a step more before it applies the gradients", true);
    choose("applies the gradients", Pc::make_odd).whole = 0;
    return;
  }
  if (more) make_step("makes a step that overwrites", false);
  choose("zeroes the gradients", Pc::mark_given_up);
}

void ServiceModel::attempt_steps(const State& s, int place, Steps& out) const {
  const auto& p = s.hosts[place];
  const auto add =
      session::steps_of_process(s, out, name_of(p), [place](State& t) -> Process& { return t.hosts[place]; });
  switch (p.pc) {
    case Pc::assemble: {
      if (!alive(s.service)) {
        auto& host = add("sees that the service has ended").hosts[place];
        host.attempt = s.word_attempt;
        go(host, Pc::await_ends);
        return;
      }
      if (!options_.patient) add("has waited too long for the team", leave_from(p));
      if (s.lease != p.lease) {
        add("sees that another host drives the session", leave_from(p));
        return;
      }
      bool ready = s.word_closed != 0;
      for (int rank = 0; rank < options_.ranks; ++rank) {
        const auto& record = s.ranks[rank];
        ready = ready && alive(s.runners[rank]) && record.ready != 0 &&
                record.acknowledged_attempt == s.word_attempt;
      }
      if (!ready) return;
      auto& t = add("finds the team ready, holds its pidfds", Pc::open_word);
      for (int rank = 0; rank < options_.ranks; ++rank) t.ranks[rank].pidfd_held = 1;
      return;
    }
    case Pc::open_word: {
      State t = s;
      t.accumulate = p.accumulate != 0 && p.overwrites == 0;
      if (t.accumulate == 0 && is(Mutation::overwritten_mark_before_the_step)) t.zeroed_step = s.steps;
      const auto attempt = change_word(t, [](auto& word) { return session::open(word); });
      t.refused = attempt == 0 || s.is_odd != 0;
      if (p.job == Job::step && s.parameters_first != s.parameters_second) t.step_on_half = 1;
      t.hosts[place].attempt = attempt & 3;
      go(t.hosts[place], Pc::wait);
      add(t.accumulate != 0 ? "opens an attempt that accumulates" : "opens an attempt that overwrites") = t;
      return;
    }
    case Pc::close_attempt: {
      auto& t = add("closes the attempt if it can");
      close_if_over(t, p.attempt);
      const bool again = s.word_abort != 0;
      if (again && is(Mutation::aborted_step_counts_as_the_first)) t.hosts[place].overwrites = 0;
      go(t.hosts[place], again ? (attempts_left(s) ? Pc::assemble : leave_from(p)) : Pc::wait);
      return;
    }
    case Pc::abort_for_supervisor:
    case Pc::abort_for_host: {
      State t = s;
      const auto author = p.pc == Pc::abort_for_host ? session::author_host : session::author_supervisor;
      const bool aborted = abort_word(t, p.attempt, author);
      go(t.hosts[place], Pc::wait);
      add(aborted ? "aborts" : "cannot abort any more") = t;
      return;
    }
    case Pc::take_result: {
      auto& t = add("returns from the step");
      auto& host = t.hosts[place];
      if (!is(Mutation::every_step_overwrites)) host.overwrites = 0;
      host.left = 0;
      t.stepped = 1;
      go(host, s.accumulate == 0 ? Pc::mark_overwritten : Pc::has_gradients);
      if (p.job != Job::none && s.accumulate != 0) go(host, Pc::say_detach);
      if (is(Mutation::interrupted_step_does_not_count))
        out.add(t, name_of(p), "is interrupted after the commit").hosts[place].overwrites = p.overwrites;
      return;
    }
    default:  // mark_overwritten
      add("notes that there are no gradients of earlier steps",
          p.job == Job::none ? Pc::has_gradients : Pc::say_detach)
          .zeroed_step = (s.steps - 1u) & 3;
      return;
  }
}

void ServiceModel::wait_steps(const State& s, int place, Steps& out) const {
  const auto& p = s.hosts[place];
  const auto word = word_of(s);
  const auto act = [&](const Observed& observed) {
    const auto move = [&](const char* what, Pc to) { go(out.add(s, name_of(p), what).hosts[place], to); };
    switch (next_action(word, all(), observed)) {
      case Action::report_abort:
        return move("sees the attempt aborted", Pc::close_attempt);
      case Action::return_result:
        return move("sees the attempt closed", Pc::take_result);
      case Action::close:
        return move("sees all slices finished", Pc::close_attempt);
      case Action::end_without_manager:
        return move("goes on without the service", Pc::await_ends);
      case Action::abort_for_supervisor:
        return move("sees a runner's death", Pc::abort_for_supervisor);
      case Action::abort_for_host:
        return move("has reached its deadline", Pc::abort_for_host);
      case Action::leave:
        return move("leaves a service that stands", leave_from(p));
      case Action::wait:
        return;
    }
  };
  Observed observed{.is_done = word.committed(all()) && slices_finished(s),
                    .of_service = !is(Mutation::host_finishes_beside_living_runners),
                    .participant_ended = seen_living(s) < options_.ranks,
                    .manager_ended = !alive(s.service)};
  act(observed);
  if (options_.patient || next_action(word, all(), observed) != Action::wait) return;
  observed.slices_stalled = true;
  observed.patience_over = !(word.committed(all()) && is(Mutation::host_waits_for_a_service_that_stands));
  act(observed);
}

// The fork server ends when no runner is left, so its pidfd tells of runners that the host does not know.
void ServiceModel::end_steps(const State& s, int place, Steps& out) const {
  const auto& p = s.hosts[place];
  const auto add =
      session::steps_of_process(s, out, name_of(p), [place](State& t) -> Process& { return t.hosts[place]; });
  const bool known = is(Mutation::host_looks_only_at_runners_it_holds);
  const bool any_lives = (known ? seen_living(s) : living(s)) > 0;
  const bool unchecked = is(Mutation::host_finishes_beside_living_runners) ||
                         is(Mutation::host_of_a_dead_service_awaits_no_runner);
  switch (p.pc) {
    case Pc::await_ends: {
      if (!any_lives || unchecked)
        add("goes on: all runners have ended", Pc::end_abort);
      else if (!options_.patient)
        add("has waited too long for the ends of runners", Pc::end_abort);
      return;
    }
    case Pc::end_abort: {
      State t = s;
      const bool aborted = abort_word(t, p.attempt, session::author_host);
      go(t.hosts[place], Pc::end_look);
      add(aborted ? "aborts" : "cannot abort") = t;
      return;
    }
    case Pc::end_look: {
      const bool committed = word_of(s).committed(all());
      const bool refuses = committed && any_lives && !unchecked;
      auto& t = add(refuses     ? "gives up: a runner lives that it cannot end"
                    : committed ? "finds the attempt committed"
                                : "finds nothing committed",
                    refuses     ? leave_from(p)
                    : committed ? Pc::slice_begin
                                : Pc::end_close);
      t.hosts[place].rank = 0;
      return;
    }
    case Pc::next_slice: {
      const bool last = p.rank + 1u == static_cast<std::uint32_t>(options_.ranks);
      ++add("goes to the next slice", last ? Pc::end_close : Pc::slice_begin).hosts[place].rank;
      return;
    }
    case Pc::end_close: {
      auto& t = add("closes the attempt", leave_from(p));
      close_if_over(t, p.attempt);
      return;
    }
    default: {
      State t = s;
      const char* what = slice_step(t, t.hosts[place], Pc::next_slice);
      add(what) = t;
      return;
    }
  }
}

// An optimizer adds the gradients. A host that was told of half-written parameters may write all of them:
// here those from before the write that was left half done.
void ServiceModel::write_half(State& s, const Process& p, bool second) const {
  const auto before = second ? s.parameters_second : s.parameters_first;
  if (p.whole != 0) {
    const auto old = s.parameters_first & s.parameters_second;
    if (second)
      s.parameters_second = old & 7;
    else
      s.parameters_first = old & 7;
    return;
  }
  const auto gradients = second ? s.ranks[0].second : s.ranks[0].first;
  if (!whole_gradients(s)) s.torn_gradient = 1;
  if ((before & gradients) != 0) s.twice = 1;
  if (second)
    s.parameters_second = (before | gradients) & 7;
  else
    s.parameters_first = (before | gradients) & 7;
}

void ServiceModel::write_steps(const State& s, int place, Steps& out) const {
  const auto& p = s.hosts[place];
  const auto add =
      session::steps_of_process(s, out, name_of(p), [place](State& t) -> Process& { return t.hosts[place]; });
  const bool late = is(Mutation::applied_mark_after_the_writing);
  const auto last = p.whole != 0 ? Pc::count_whole : Pc::make_even;
  switch (p.pc) {
    case Pc::make_odd:
      add("makes the version of the parameters odd",
          late || is(Mutation::applied_without_a_mark) ? Pc::write_first : Pc::mark_applied)
          .is_odd ^= 1u;
      return;
    case Pc::mark_applied:
      add("marks the gradients as applied", late ? last : Pc::write_first).applied_step = s.steps;
      return;
    case Pc::write_first: {
      auto& t = add("writes the first half of the parameters", Pc::write_second);
      write_half(t, p, false);
      t.wrote = 1;
      if (p.whole == 0) return;
      const bool marked = is(Mutation::mark_cleared_by_an_interrupted_write);
      auto& host = add("is interrupted before it has written all").hosts[place];
      host.whole = marked;
      go(host, marked ? Pc::count_whole : Pc::make_even);
      return;
    }
    case Pc::write_second: {
      auto& t = add("writes the second half of the parameters", late ? Pc::mark_applied : last);
      write_half(t, p, true);
      if (p.closed != 0 || p.detached != 0) return;
      // Another thread of the host ends the handle meanwhile. What this one writes is private from then on,
      // or, if the host could not give up its mappings, it closes its socket without a Detach.
      if (is(Mutation::detached_with_its_mappings)) {
        add("detaches on another thread, with its mappings").hosts[place].detached = 1;
        return;
      }
      add("gives up its mappings on another thread", Pc::say_detach);
      add("closes its socket on another thread").hosts[place].closed = 1;
      return;
    }
    case Pc::count_whole:
      add("marks its write as whole", Pc::make_even).written_whole = 1;
      return;
    default: {  // make_even
      auto& t = add("makes the version of the parameters even");
      t.is_odd ^= 1u;
      t.owed &= ~s.parameters_first & 7u;
      auto& host = t.hosts[place];
      host.whole = 0;
      go(host, p.closed != 0 || p.detached != 0 ? Pc::lingers : p.whole != 0 ? Pc::found : Pc::has_written);
      if (host.pc == Pc::has_written) host.left = 0;
      return;
    }
  }
}

void ServiceModel::zero_steps(const State& s, int place, Steps& out) const {
  const auto& p = s.hosts[place];
  const auto add =
      session::steps_of_process(s, out, name_of(p), [place](State& t) -> Process& { return t.hosts[place]; });
  const bool early = is(Mutation::zeroed_mark_before_the_zeroing);
  switch (p.pc) {
    case Pc::mark_given_up: {
      auto& t = add("marks the gradients as used up", early ? Pc::mark_zeroed : Pc::zero_first);
      if (!is(Mutation::zeroing_without_a_mark)) t.applied_step = s.steps;
      t.owed = 0;
      return;
    }
    case Pc::zero_first:
    case Pc::zero_second: {
      const bool first = p.pc == Pc::zero_first;
      auto& t = add(first ? "zeroes the first half of the gradients" : "zeroes the second half",
                    first   ? Pc::zero_second
                    : early ? Pc::found
                            : Pc::mark_zeroed);
      for (auto& rank : t.ranks) {
        if (first)
          rank.first = 0;
        else
          rank.second = 0;
      }
      return;
    }
    default: {  // mark_zeroed
      auto& t = add("marks the gradients as zeroed");
      t.zeroed_step = s.steps;
      auto& host = t.hosts[place];
      host.overwrites = host.left = 0;
      go(host, early ? Pc::zero_first : Pc::found);
      return;
    }
  }
}

}  // namespace accelmgr::client::model
