#include "protocol_model.hpp"

#include <gtest/gtest.h>

#include <ostream>
#include <string>

namespace accelmgr::session::model {
namespace {

constexpr std::size_t most_states = 10'000'000;

void explore_and_report(const ProtocolModel::Options& options) {
  const ProtocolModel model(options);
  const auto found = Explorer(model).explore(most_states);
  fmt::print("{} runners, {} deaths, {}: {} states, {} steps\n", options.ranks, options.deaths,
             options.patient ? "no deadlines" : "deadlines at any time", found.states, found.steps);
  EXPECT_EQ(found.broken, "") << found.trace;
  EXPECT_GT(found.states, 10'000u);
}

// With sanitizers or without optimization the explorer visits about twenty times fewer states a second.
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
constexpr ProtocolModel::Options two_runners{.ranks = 2, .chunks = 2, .deaths = 2};
constexpr bool three_runners_in_time = true;
#else
constexpr ProtocolModel::Options two_runners{.ranks = 2, .chunks = 1, .deaths = 1};
constexpr bool three_runners_in_time = false;
#endif

ProtocolModel::Options without_deadlines(ProtocolModel::Options options) {
  options.patient = true;
  return options;
}

TEST(Protocol, ForTwoRunnersIsNeverTwiceNeverLostNeverStuck) { explore_and_report(two_runners); }

// No promise may depend on a deadline: without any deadline the protocol does not get stuck either.
TEST(Protocol, ForTwoRunnersIsNeverStuckWithoutDeadlines) {
  explore_and_report(without_deadlines(two_runners));
}

ProtocolModel::Options of_inner_steps(ProtocolModel::Options options) {
  options.inner = true;
  return options;
}

TEST(Protocol, OfInnerStepsForTwoRunnersIsNeverTwiceNeverLostNeverStuck) {
  explore_and_report(of_inner_steps(two_runners));
}

TEST(Protocol, OfInnerStepsForTwoRunnersIsNeverStuckWithoutDeadlines) {
  explore_and_report(of_inner_steps(without_deadlines(two_runners)));
}

ProtocolModel::Options with_updates(ProtocolModel::Options options) {
  options.updates = true;
  options.chunks = 1;
  return options;
}

TEST(Protocol, WithUpdatesForTwoRunnersIsNeverTwiceNeverLostNeverStuck) {
  explore_and_report(with_updates(two_runners));
}

TEST(Protocol, WithUpdatesForTwoRunnersIsNeverStuckWithoutDeadlines) {
  explore_and_report(with_updates(without_deadlines(two_runners)));
}

constexpr ProtocolModel::Options three_runners{
    .ranks = 3, .chunks = 1, .deaths = 1, .host_dies = false, .private_steps = false};

/// Three runners have millions of states. A slow build could visit only a few of them in a test's time, which
/// would prove nothing; it explores two runners.
class ProtocolOfThree : public testing::Test {
 protected:
  void SetUp() override {
    if (!three_runners_in_time) GTEST_SKIP() << "millions of states: optimized builds only";
  }
};

TEST_F(ProtocolOfThree, IsNeverTwiceNeverLostNeverStuck) { explore_and_report(three_runners); }

TEST_F(ProtocolOfThree, OfInnerStepsIsNeverTwiceNeverLostNeverStuck) {
  explore_and_report(of_inner_steps(three_runners));
}

TEST_F(ProtocolOfThree, WithUpdatesIsNeverTwiceNeverLostNeverStuck) {
  explore_and_report(with_updates(three_runners));
}

TEST_F(ProtocolOfThree, IsNeverStuckWithoutDeadlines) {
  explore_and_report(without_deadlines(three_runners));
}

struct WrongTurn {
  const char* name;
  Mutation mutation;
  const char* promise;  ///< The promise that the wrong turn breaks first.
};
void PrintTo(const WrongTurn& turn, std::ostream* out) { *out << turn.name; }

class ProtocolMutation : public testing::TestWithParam<WrongTurn> {};

// Finding no defect in the protocol means something only because the explorer finds these defects.
TEST_P(ProtocolMutation, IsFound) {
  const auto mutation = GetParam().mutation;
  const bool updates = mutation >= Mutation::update_before_all_slices_are_reduced;
  const bool inner = mutation >= Mutation::applied_before_the_attempt_is_closed && !updates;
  const ProtocolModel model({.ranks = 2,
                             .chunks = 1,
                             .deaths = 1,
                             .patient = true,
                             .inner = inner,
                             .updates = updates,
                             .mutation = mutation});
  const auto found = Explorer(model).explore(most_states);
  EXPECT_TRUE(found.broken.starts_with(GetParam().promise)) << found.broken << "\n" << found.trace;
  EXPECT_NE(found.trace, "");
}

INSTANTIATE_TEST_SUITE_P(
    Each, ProtocolMutation,
    testing::Values(
        WrongTurn{"AbortFlipsTheIndex", Mutation::abort_flips_the_index, "never lost: the valid counters"},
        WrongTurn{"AbortOfACommittedAttempt", Mutation::abort_of_a_committed_attempt, "never "},
        WrongTurn{"SliceTakenFromTheLiving", Mutation::slice_taken_from_the_living, "never twice"},
        WrongTurn{"ReplacementBeforeTheAttemptIsClosed", Mutation::replacement_before_the_attempt_is_closed,
                  "no trace"},
        WrongTurn{"RecoveryWithoutUndo", Mutation::recovery_without_undo, "never twice"},
        WrongTurn{"InFlightBeforeTheImageIsSaved", Mutation::in_flight_before_the_image_is_saved,
                  "never twice"},
        WrongTurn{"VoteBeforeTheCopiesAreWritten", Mutation::vote_before_the_copies_are_written,
                  "valid copies"},
        WrongTurn{"CloseBeforeAllSlicesAreFinished", Mutation::close_before_all_slices_are_finished,
                  "never lost"},
        WrongTurn{"HostFinishesBesideLivingRunners", Mutation::host_finishes_beside_living_runners,
                  "never twice"},
        WrongTurn{"StateKeptAfterAnAbort", Mutation::state_kept_after_an_abort, "no trace"},
        WrongTurn{"SliceOfTheDeadLeft", Mutation::slice_of_the_dead_left, "never stuck"},
        WrongTurn{"ReplacementWhosePidfdNobodyHolds", Mutation::replacement_whose_pidfd_nobody_holds,
                  "never stuck"},
        WrongTurn{"AppliedBeforeTheAttemptIsClosed", Mutation::applied_before_the_attempt_is_closed,
                  "never lost: a runner applies"},
        WrongTurn{"ReplacementWithoutTheStepsBefore", Mutation::replacement_without_the_steps_before,
                  "never lost: a runner votes"},
        WrongTurn{"HostChangesWhatIsApplied", Mutation::host_changes_what_is_applied,
                  "never lost: a runner applies"},
        WrongTurn{"UpdateBeforeAllSlicesAreReduced", Mutation::update_before_all_slices_are_reduced,
                  "never twice: parameters"},
        WrongTurn{"UpdateInFlightBeforeTheImageIsWritten",
                  Mutation::update_in_flight_before_the_image_is_written, "never twice: parameters"},
        WrongTurn{"UpdateComputedAgain", Mutation::update_computed_again, "never twice: parameters"},
        WrongTurn{"CloseBeforeAllSlicesAreUpdated", Mutation::close_before_all_slices_are_updated,
                  "never lost: parameters"},
        WrongTurn{"UpdateOfTheDeadLeft", Mutation::update_of_the_dead_left, "never stuck"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace accelmgr::session::model
