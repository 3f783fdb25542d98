#include "service_model.hpp"

#include <gtest/gtest.h>

#include <ostream>
#include <string>

namespace accelmgr::client::model {
namespace {

constexpr std::size_t most_states = 10'000'000;

using Options = ServiceModel::Options;

void explore_and_report(const Options& options) {
  const ServiceModel model(options);
  const auto found = session::Explorer(model).explore(most_states);
  fmt::print("{} runners, {} attempts, {} hosts, {} deaths, {} stops, {}: {} states, {} steps\n",
             options.ranks, options.attempts, options.hosts, options.deaths, options.stops,
             options.patient ? "no deadlines" : "deadlines at any time", found.states, found.steps);
  EXPECT_EQ(found.broken, "") << found.trace;
  EXPECT_GT(found.states, 10'000u);
}

// With sanitizers or without optimization the explorer visits fewer states a second.
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
constexpr Options two_runners{.ranks = 2, .attempts = 2, .hosts = 2, .deaths = 1, .stops = 0};
constexpr Options two_runners_stop{.ranks = 2, .attempts = 2, .hosts = 1, .deaths = 1, .stops = 1};
constexpr Options three_steps{.ranks = 1, .attempts = 3, .hosts = 2, .deaths = 2, .stops = 0};
constexpr Options three_hosts{.ranks = 1, .attempts = 3, .hosts = 3, .deaths = 1, .stops = 0};
constexpr Options two_stops{.ranks = 1, .attempts = 2, .hosts = 2, .deaths = 1, .stops = 2};
#else
constexpr Options two_runners{.ranks = 2, .attempts = 1, .hosts = 2, .deaths = 1, .stops = 0};
constexpr Options two_runners_stop{.ranks = 2, .attempts = 1, .hosts = 1, .deaths = 0, .stops = 1};
constexpr Options three_steps{
    .ranks = 1, .attempts = 3, .hosts = 2, .deaths = 1, .stops = 0, .service_steps = false};
constexpr Options three_hosts{
    .ranks = 1, .attempts = 1, .hosts = 3, .deaths = 1, .stops = 0, .service_steps = false};
constexpr Options two_stops{.ranks = 1, .attempts = 1, .hosts = 2, .deaths = 0, .stops = 2};
#endif

constexpr Options without_deadlines(Options options) {
  options.patient = true;
  return options;
}

TEST(Service, OfTwoRunnersIsNeverTwiceNeverHalfNeverStuck) { explore_and_report(two_runners); }

// No promise may depend on a deadline: without any deadline nothing gets stuck either, as long as nobody is
// stopped.
TEST(Service, OfTwoRunnersIsNeverStuckWithoutDeadlines) {
  explore_and_report(without_deadlines(two_runners));
}

TEST(Service, WhoseProcessesAreStoppedIsNeverTwiceNeverHalfNeverStuck) {
  explore_and_report(two_runners_stop);
}

TEST(Service, AppliesNoGradientTwiceInThreeSteps) { explore_and_report(three_steps); }

TEST(Service, TellsEachOfThreeHostsWhatTheOthersHaveLeft) { explore_and_report(three_hosts); }

TEST(Service, WhoseProcessesAreStoppedTwiceGoesOnWithTheNextHost) { explore_and_report(two_stops); }

struct WrongTurn {
  const char* name;
  Mutation mutation;
  const char* promise;  ///< The promise that the wrong turn breaks first.
  Options options{.ranks = 1, .attempts = 2, .hosts = 2, .deaths = 1, .stops = 1};
};
void PrintTo(const WrongTurn& turn, std::ostream* out) { *out << turn.name; }

class ServiceMutation : public testing::TestWithParam<WrongTurn> {};

// Finding no defect means something only because the explorer finds these defects.
TEST_P(ServiceMutation, IsFound) {
  auto options = GetParam().options;
  options.mutation = GetParam().mutation;
  const ServiceModel model(options);
  const auto found = session::Explorer(model).explore(most_states);
  EXPECT_TRUE(found.broken.starts_with(GetParam().promise)) << found.broken << "\n" << found.trace;
}

constexpr Options one_attempt{.ranks = 1, .attempts = 1, .hosts = 1, .deaths = 1, .stops = 0};
constexpr Options three_attempts{.ranks = 1, .attempts = 3, .hosts = 2, .deaths = 0, .stops = 0};

INSTANTIATE_TEST_SUITE_P(
    OfAttempts, ServiceMutation,
    testing::Values(WrongTurn{"HostFinishesBesideLivingRunners",
                              Mutation::host_finishes_beside_living_runners, "never twice"},
                    WrongTurn{"HostOfADeadServiceAwaitsNoRunner",
                              Mutation::host_of_a_dead_service_awaits_no_runner, "never twice"},
                    WrongTurn{"HostLooksOnlyAtRunnersItHolds", Mutation::host_looks_only_at_runners_it_holds,
                              "never twice"},
                    WrongTurn{"HostWaitsForAServiceThatStands",
                              Mutation::host_waits_for_a_service_that_stands, "never stuck"},
                    WrongTurn{"StoppedRunnerTakenForDead", Mutation::stopped_runner_taken_for_dead,
                              "never twice"},
                    WrongTurn{"SliceOfTheDeadLeftWithoutAHost",
                              Mutation::slice_of_the_dead_left_without_a_host, "never stuck"},
                    WrongTurn{"RunnersOutliveTheService", Mutation::runners_outlive_the_service,
                              "never stuck", without_deadlines(one_attempt)}),
    [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(
    OfTheLease, ServiceMutation,
    testing::Values(WrongTurn{"NextHostBeforeTheAttemptIsClosed",
                              Mutation::next_host_before_the_attempt_is_closed, "told"},
                    WrongTurn{"AbortedAttemptOfTheGoneLeftOpen",
                              Mutation::aborted_attempt_of_the_gone_left_open, "never stuck", one_attempt},
                    WrongTurn{"ClosedSocketTakenForGone", Mutation::closed_socket_taken_for_gone,
                              "never half"},
                    WrongTurn{"DetachedWithItsMappings", Mutation::detached_with_its_mappings, "never half"},
                    WrongTurn{"StoppedHostTakenForGone", Mutation::stopped_host_taken_for_gone, "never lost"},
                    WrongTurn{"HostStoppedInAWriteTakenForGone",
                              Mutation::host_stopped_in_a_write_taken_for_gone, "told"},
                    WrongTurn{"LeaseKeptByTheDead", Mutation::lease_kept_by_the_dead, "never stuck"}),
    [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(
    OfTheMarksOfGradients, ServiceMutation,
    testing::Values(
        WrongTurn{"FirstStepAddsToTheApplied", Mutation::first_step_adds_to_the_applied, "never twice"},
        WrongTurn{"AbortedStepCountsAsTheFirst", Mutation::aborted_step_counts_as_the_first, "never twice",
                  three_attempts},
        WrongTurn{"InterruptedStepDoesNotCount", Mutation::interrupted_step_does_not_count, "never lost",
                  three_attempts},
        WrongTurn{"EveryStepOverwrites", Mutation::every_step_overwrites, "never lost", three_attempts},
        WrongTurn{"ServiceAddsToTheApplied", Mutation::service_adds_to_the_applied, "told"},
        WrongTurn{"OverwrittenMarkBeforeTheStep", Mutation::overwritten_mark_before_the_step, "told"},
        WrongTurn{"ZeroedMarkBeforeTheZeroing", Mutation::zeroed_mark_before_the_zeroing, "told"},
        WrongTurn{"ZeroingWithoutAMark", Mutation::zeroing_without_a_mark, "told"},
        WrongTurn{"AppliedMarkAfterTheWriting", Mutation::applied_mark_after_the_writing, "told"},
        WrongTurn{"AppliedWithoutAMark", Mutation::applied_without_a_mark, "told"}),
    [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(
    OfTheMarksOfParameters, ServiceMutation,
    testing::Values(
        WrongTurn{"HalfWrittenNotNoted", Mutation::half_written_not_noted, "never half"},
        WrongTurn{"VersionLeftOdd", Mutation::version_left_odd, "never lost"},
        WrongTurn{"MarkClearedByAStep", Mutation::mark_cleared_by_a_step, "never half"},
        WrongTurn{"MarkClearedByAnyWrite", Mutation::mark_cleared_by_any_write, "never half"},
        WrongTurn{"MarkClearedByAnEarlierWrite", Mutation::mark_cleared_by_an_earlier_write, "never half"},
        WrongTurn{"MarkClearedByAnInterruptedWrite", Mutation::mark_cleared_by_an_interrupted_write,
                  "never half"},
        WrongTurn{"ServiceStepsOnHalfWritten", Mutation::service_steps_on_half_written, "never half"},
        WrongTurn{"ServiceSavesHalfOverGood", Mutation::service_saves_half_over_good, "never half"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace accelmgr::client::model
