#include "service_model.hpp"

#include "engine/session/model_checks.hpp"

namespace accelmgr::client::model {
namespace {

using session::without_deadlines;
using Options = ServiceModel::Options;
using Case = session::ModelCase<ServiceModel>;

constexpr bool fast = session::explores_fast;
constexpr Options two_runners{.ranks = 2, .attempts = fast ? 2 : 1, .hosts = 2, .deaths = 1, .stops = 0};
constexpr Options two_runners_stop{
    .ranks = 2, .attempts = fast ? 2 : 1, .hosts = 1, .deaths = fast ? 1 : 0, .stops = 1};
constexpr Options three_steps{
    .ranks = 1, .attempts = 3, .hosts = 2, .deaths = fast ? 2 : 1, .stops = 0, .service_steps = fast};
constexpr Options three_hosts{
    .ranks = 1, .attempts = fast ? 3 : 1, .hosts = 3, .deaths = 1, .stops = 0, .service_steps = fast};
constexpr Options two_stops{
    .ranks = 1, .attempts = fast ? 2 : 1, .hosts = 2, .deaths = fast ? 1 : 0, .stops = 2};

class Service : public session::ModelTest<ServiceModel> {};

TEST_P(Service, IsNeverTwiceNeverHalfNeverStuck) { expect_promises_kept(); }

// Without deadlines nothing gets stuck as long as nobody is stopped.
INSTANTIATE_TEST_SUITE_P(Each, Service,
                         testing::Values(Case{"OfTwoRunners", two_runners},
                                         Case{"OfTwoRunnersWithoutDeadlines", without_deadlines(two_runners)},
                                         Case{"WhoseProcessesAreStopped", two_runners_stop},
                                         Case{"InThreeSteps", three_steps}, Case{"OfThreeHosts", three_hosts},
                                         Case{"WhoseProcessesAreStoppedTwice", two_stops}),
                         session::name_of_case);

Case wrong_turn(const char* name, Mutation mutation, const char* promise,
                Options options = {.ranks = 1, .attempts = 2, .hosts = 2, .deaths = 1, .stops = 1}) {
  options.mutation = mutation;
  return {name, options, promise};
}

constexpr Options one_attempt{.ranks = 1, .attempts = 1, .hosts = 1, .deaths = 1, .stops = 0};
constexpr Options three_attempts{.ranks = 1, .attempts = 3, .hosts = 2, .deaths = 0, .stops = 0};

class ServiceMutation : public session::ModelTest<ServiceModel> {};

TEST_P(ServiceMutation, IsFound) { expect_wrong_turn_found(); }

INSTANTIATE_TEST_SUITE_P(
    Each, ServiceMutation,
    testing::Values(
        wrong_turn("HostFinishesBesideLivingRunners", Mutation::host_finishes_beside_living_runners,
                   "never twice"),
        wrong_turn("HostOfADeadServiceAwaitsNoRunner", Mutation::host_of_a_dead_service_awaits_no_runner,
                   "never twice"),
        wrong_turn("HostLooksOnlyAtRunnersItHolds", Mutation::host_looks_only_at_runners_it_holds,
                   "never twice"),
        wrong_turn("HostWaitsForAServiceThatStands", Mutation::host_waits_for_a_service_that_stands,
                   "never stuck"),
        wrong_turn("StoppedRunnerTakenForDead", Mutation::stopped_runner_taken_for_dead, "never twice"),
        wrong_turn("SliceOfTheDeadLeftWithoutAHost", Mutation::slice_of_the_dead_left_without_a_host,
                   "never stuck"),
        wrong_turn("RunnersOutliveTheService", Mutation::runners_outlive_the_service, "never stuck",
                   without_deadlines(one_attempt)),
        wrong_turn("NextHostBeforeTheAttemptIsClosed", Mutation::next_host_before_the_attempt_is_closed,
                   "told"),
        wrong_turn("AbortedAttemptOfTheGoneLeftOpen", Mutation::aborted_attempt_of_the_gone_left_open,
                   "never stuck", one_attempt),
        wrong_turn("ClosedSocketTakenForGone", Mutation::closed_socket_taken_for_gone, "never half"),
        wrong_turn("DetachedWithItsMappings", Mutation::detached_with_its_mappings, "never half"),
        wrong_turn("StoppedHostTakenForGone", Mutation::stopped_host_taken_for_gone, "never lost"),
        wrong_turn("HostStoppedInAWriteTakenForGone", Mutation::host_stopped_in_a_write_taken_for_gone,
                   "told"),
        wrong_turn("LeaseKeptByTheDead", Mutation::lease_kept_by_the_dead, "never stuck"),
        wrong_turn("FirstStepAddsToTheApplied", Mutation::first_step_adds_to_the_applied, "never twice"),
        wrong_turn("AbortedStepCountsAsTheFirst", Mutation::aborted_step_counts_as_the_first, "never twice",
                   three_attempts),
        wrong_turn("InterruptedStepDoesNotCount", Mutation::interrupted_step_does_not_count, "never lost",
                   three_attempts),
        wrong_turn("EveryStepOverwrites", Mutation::every_step_overwrites, "never lost", three_attempts),
        wrong_turn("ServiceAddsToTheApplied", Mutation::service_adds_to_the_applied, "told"),
        wrong_turn("OverwrittenMarkBeforeTheStep", Mutation::overwritten_mark_before_the_step, "told"),
        wrong_turn("ZeroedMarkBeforeTheZeroing", Mutation::zeroed_mark_before_the_zeroing, "told"),
        wrong_turn("ZeroingWithoutAMark", Mutation::zeroing_without_a_mark, "told"),
        wrong_turn("AppliedMarkAfterTheWriting", Mutation::applied_mark_after_the_writing, "told"),
        wrong_turn("AppliedWithoutAMark", Mutation::applied_without_a_mark, "told"),
        wrong_turn("HalfWrittenNotNoted", Mutation::half_written_not_noted, "never half"),
        wrong_turn("VersionLeftOdd", Mutation::version_left_odd, "never lost"),
        wrong_turn("MarkClearedByAStep", Mutation::mark_cleared_by_a_step, "never half"),
        wrong_turn("MarkClearedByAnyWrite", Mutation::mark_cleared_by_any_write, "never half"),
        wrong_turn("MarkClearedByAnEarlierWrite", Mutation::mark_cleared_by_an_earlier_write, "never half"),
        wrong_turn("MarkClearedByAnInterruptedWrite", Mutation::mark_cleared_by_an_interrupted_write,
                   "never half"),
        wrong_turn("ServiceStepsOnHalfWritten", Mutation::service_steps_on_half_written, "never half"),
        wrong_turn("ServiceSavesHalfOverGood", Mutation::service_saves_half_over_good, "never half")),
    session::name_of_case);

}  // namespace
}  // namespace accelmgr::client::model
