#include "engine/client/next_action.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <atomic>
#include <ostream>

namespace accelmgr::client {

std::ostream& operator<<(std::ostream& to, Action action) { return to << static_cast<int>(action); }

namespace {

using session::StepWord;

constexpr session::RankMask three = 0b111;
constexpr StepWord computing{.attempt = 7, .closed = false, .mask = 0b101};
constexpr StepWord committed{.attempt = 7, .closed = false, .mask = three};
constexpr StepWord aborted{.attempt = 7, .closed = false, .abort = true, .mask = 1};
constexpr StepWord closed{.attempt = 7, .index = 1, .closed = true, .mask = three};
constexpr StepWord closed_abort{.attempt = 7, .closed = true, .abort = true, .mask = 1};

TEST(NextAction, IsThatOfTheTable) {
  struct Row {
    StepWord word;
    Observed observed;
    Action action;
  };
  const Row rows[] = {
      {aborted, {}, Action::report_abort},
      {closed_abort, {}, Action::report_abort},
      {closed, {}, Action::return_result},
      {committed, {}, Action::wait},
      {committed, {.is_done = true}, Action::close},
      {committed, {.is_done = true, .manager_ended = true}, Action::close},
      {committed, {.slices_stalled = true}, Action::end_without_manager},
      {committed, {.slices_stalled = true, .of_service = true}, Action::wait},
      {committed, {.slices_stalled = true, .of_service = true, .patience_over = true}, Action::leave},
      {committed, {.of_service = true, .patience_over = true}, Action::wait},
      {committed,
       {.slices_stalled = true, .of_service = true, .manager_ended = true},
       Action::end_without_manager},
      {committed, {.manager_ended = true}, Action::end_without_manager},
      {committed, {.participant_ended = true}, Action::wait},  // The supervisor finishes its slice.
      {committed, {.patience_over = true}, Action::wait},      // What is committed counts.
      {computing, {}, Action::wait},
      {computing, {.participant_ended = true}, Action::abort_for_supervisor},
      {computing, {.patience_over = true}, Action::abort_for_host},
      {computing, {.participant_ended = true, .patience_over = true}, Action::abort_for_supervisor},
      {computing, {.manager_ended = true}, Action::end_without_manager},
      {computing,
       {.participant_ended = true, .manager_ended = true, .patience_over = true},
       Action::end_without_manager},
  };
  for (const auto& row : rows)
    EXPECT_EQ(next_action(row.word, three, row.observed), row.action) << "row " << &row - rows;
}

/// Each bit says whether one thing is observed.
constexpr unsigned all_observations = 1 << 6;
Observed observed_in(unsigned bits) {
  const auto is = [bits](int bit) { return (bits >> bit & 1) != 0; };
  return {is(0), is(1), is(2), is(3), is(4), is(5)};
}

RC_GTEST_PROP(NextAction, KeepsItsPromisesForAnyWordWhateverIsObserved, ()) {
  const auto participants = *rc::gen::inRange(1u, 1u << 24);
  const auto any_word = *rc::gen::construct<StepWord>(
      rc::gen::inRange<std::uint64_t>(0, 1ull << 37), rc::gen::inRange(0u, 2u), rc::gen::arbitrary<bool>(),
      rc::gen::arbitrary<bool>(), rc::gen::inRange(0u, 1u << 24));
  const auto word = *rc::gen::element(any_word, StepWord{.closed = false, .mask = participants});
  const bool is_committed = word.committed(participants);
  for (unsigned bits = 0; bits < all_observations; ++bits) {
    const auto observed = observed_in(bits);
    const auto action = next_action(word, participants, observed);
    const bool aborts = action == Action::abort_for_host || action == Action::abort_for_supervisor;
    RC_ASSERT((action == Action::return_result) == (word.closed && !word.abort));
    RC_ASSERT((action == Action::report_abort) == word.abort);
    RC_ASSERT(!aborts || (word.computing(participants) && !is_committed));
    RC_ASSERT(action != Action::close || is_committed);
    // It waits for no longer than the host's patience or the manager's life.
    if (observed.manager_ended || (observed.patience_over && !is_committed))
      RC_ASSERT(action != Action::wait);
    const bool service_lives = observed.of_service && !observed.manager_ended;
    RC_ASSERT(action != Action::end_without_manager || !service_lives);
    RC_ASSERT(action != Action::leave || (observed.patience_over && observed.slices_stalled));
  }
}

/// Takes the actions on a real step word. In between, ranks vote and slices are reduced, at random.
RC_GTEST_PROP(NextAction, BringsEveryAttemptToOneEnd, ()) {
  const int ranks = *rc::gen::inRange(1, 5);
  const auto participants = session::all_ranks(ranks);
  std::atomic<std::uint64_t> word{session::initial_step_word};
  const auto attempt = session::open(word);
  int reduced = 0;
  bool was_committed = false;
  constexpr int patience = 20;
  for (int looks = 0;; ++looks) {
    // Both the word and what is observed are a moment old when the host acts.
    const auto seen = session::load(word);
    auto observed = observed_in(*rc::gen::inRange(0u, all_observations));
    observed.is_done = reduced == ranks;
    observed.patience_over = observed.patience_over || looks > patience;
    if (seen.committed(participants)) observed.slices_stalled = looks > patience;
    if (*rc::gen::arbitrary<bool>()) session::vote(word, attempt, *rc::gen::inRange(0, ranks), participants);
    was_committed = was_committed || session::load(word).committed(participants);
    if (was_committed && reduced < ranks) ++reduced;
    switch (next_action(seen, participants, observed)) {
      case Action::report_abort:
        RC_ASSERT(!was_committed);
        return;
      case Action::return_result:
        RC_ASSERT(was_committed && session::load(word).index == 1);
        return;
      case Action::close:
        session::close(word, attempt, participants);
        break;
      case Action::end_without_manager:  // As Stepper::manager_lost() does.
        session::abort(word, attempt, session::author_host, participants);
        RC_ASSERT(session::close(word, attempt, participants));
        RC_ASSERT((session::load(word).index == 1) == was_committed);
        return;
      case Action::abort_for_supervisor:
        session::abort(word, attempt, session::author_supervisor, participants);
        break;
      case Action::abort_for_host:
        session::abort(word, attempt, session::author_host, participants);
        break;
      case Action::leave:
        RC_ASSERT(was_committed && observed.of_service);
        return;  // The service brings it to its end.
      case Action::wait:
        break;
    }
    RC_ASSERT(looks < patience + 5);
  }
}

}  // namespace
}  // namespace accelmgr::client
