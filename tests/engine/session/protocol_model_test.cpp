#include "protocol_model.hpp"

#include "model_checks.hpp"

namespace accelmgr::session::model {
namespace {

using Options = ProtocolModel::Options;
using Case = ModelCase<ProtocolModel>;

constexpr Options two_runners{.ranks = 2, .chunks = explores_fast ? 2 : 1, .deaths = explores_fast ? 2 : 1};
constexpr Options three_runners{
    .ranks = 3, .chunks = 1, .deaths = 1, .host_dies = false, .private_steps = false};

constexpr Options of_inner_steps(Options options) {
  options.inner = true;
  return options;
}
constexpr Options with_updates(Options options) {
  options.updates = true;
  options.chunks = 1;
  return options;
}

class Protocol : public ModelTest<ProtocolModel> {};

// Three runners have millions of states. A slow build could visit only a few of them in a test's time, which
// would prove nothing; it explores two runners.
TEST_P(Protocol, IsNeverTwiceNeverLostNeverStuck) {
  if (GetParam().options.ranks > 2 && !explores_fast)
    GTEST_SKIP() << "millions of states: optimized builds only";
  expect_promises_kept();
}

INSTANTIATE_TEST_SUITE_P(
    Each, Protocol,
    testing::Values(
        Case{"ForTwoRunners", two_runners},
        Case{"ForTwoRunnersWithoutDeadlines", without_deadlines(two_runners)},
        Case{"OfInnerStepsForTwoRunners", of_inner_steps(two_runners)},
        Case{"OfInnerStepsForTwoRunnersWithoutDeadlines", of_inner_steps(without_deadlines(two_runners))},
        Case{"WithUpdatesForTwoRunners", with_updates(two_runners)},
        Case{"WithUpdatesForTwoRunnersWithoutDeadlines", with_updates(without_deadlines(two_runners))},
        Case{"ForThreeRunners", three_runners},
        Case{"OfInnerStepsForThreeRunners", of_inner_steps(three_runners)},
        Case{"WithUpdatesForThreeRunners", with_updates(three_runners)},
        Case{"ForThreeRunnersWithoutDeadlines", without_deadlines(three_runners)}),
    name_of_case);

Case wrong_turn(const char* name, Mutation mutation, const char* promise) {
  const bool updates = mutation >= Mutation::update_before_all_slices_are_reduced;
  const bool inner = mutation >= Mutation::applied_before_the_attempt_is_closed && !updates;
  return {name,
          {.ranks = 2,
           .chunks = 1,
           .deaths = 1,
           .patient = true,
           .inner = inner,
           .updates = updates,
           .mutation = mutation},
          promise};
}

class ProtocolMutation : public ModelTest<ProtocolModel> {};

TEST_P(ProtocolMutation, IsFound) { expect_wrong_turn_found(); }

INSTANTIATE_TEST_SUITE_P(
    Each, ProtocolMutation,
    testing::Values(
        wrong_turn("AbortFlipsTheIndex", Mutation::abort_flips_the_index, "never lost: the valid counters"),
        wrong_turn("AbortOfACommittedAttempt", Mutation::abort_of_a_committed_attempt, "never "),
        wrong_turn("SliceTakenFromTheLiving", Mutation::slice_taken_from_the_living, "never twice"),
        wrong_turn("ReplacementBeforeTheAttemptIsClosed", Mutation::replacement_before_the_attempt_is_closed,
                   "no trace"),
        wrong_turn("RecoveryWithoutUndo", Mutation::recovery_without_undo, "never twice"),
        wrong_turn("InFlightBeforeTheImageIsSaved", Mutation::in_flight_before_the_image_is_saved,
                   "never twice"),
        wrong_turn("VoteBeforeTheCopiesAreWritten", Mutation::vote_before_the_copies_are_written,
                   "valid copies"),
        wrong_turn("CloseBeforeAllSlicesAreFinished", Mutation::close_before_all_slices_are_finished,
                   "never lost"),
        wrong_turn("HostFinishesBesideLivingRunners", Mutation::host_finishes_beside_living_runners,
                   "never twice"),
        wrong_turn("StateKeptAfterAnAbort", Mutation::state_kept_after_an_abort, "no trace"),
        wrong_turn("SliceOfTheDeadLeft", Mutation::slice_of_the_dead_left, "never stuck"),
        wrong_turn("ReplacementWhosePidfdNobodyHolds", Mutation::replacement_whose_pidfd_nobody_holds,
                   "never stuck"),
        wrong_turn("AppliedBeforeTheAttemptIsClosed", Mutation::applied_before_the_attempt_is_closed,
                   "never lost: a runner applies"),
        wrong_turn("ReplacementWithoutTheStepsBefore", Mutation::replacement_without_the_steps_before,
                   "never lost: a runner votes"),
        wrong_turn("HostChangesWhatIsApplied", Mutation::host_changes_what_is_applied,
                   "never lost: a runner applies"),
        wrong_turn("UpdateBeforeAllSlicesAreReduced", Mutation::update_before_all_slices_are_reduced,
                   "never twice: parameters"),
        wrong_turn("UpdateInFlightBeforeTheImageIsWritten",
                   Mutation::update_in_flight_before_the_image_is_written, "never twice: parameters"),
        wrong_turn("UpdateComputedAgain", Mutation::update_computed_again, "never twice: parameters"),
        wrong_turn("CloseBeforeAllSlicesAreUpdated", Mutation::close_before_all_slices_are_updated,
                   "never lost: parameters"),
        wrong_turn("UpdateOfTheDeadLeft", Mutation::update_of_the_dead_left, "never stuck")),
    name_of_case);

}  // namespace
}  // namespace accelmgr::session::model
