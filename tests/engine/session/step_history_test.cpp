// What those who watch a session see of its last steps, while a host writes them, and after it was killed.
#include "engine/session/step_history.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <string>

#include "ring_checks.hpp"

namespace accelmgr::session {
namespace {

/// A record all of whose fields follow from its number. Each third one did not count.
StepRecord record_numbered(std::uint64_t number) {
  const auto n = static_cast<std::int64_t>(number);
  const bool counted = number % 3 != 0;
  return {.time_ns = n * 1000,
          .step = number + 1,
          .attempt = number + 2,
          .loss = double(number) / 4,
          .samples = number * 8,
          .duration_ns = n * 1'000'000,
          .compute_ns = n * 500'000,
          .reduce_ns = n * 1000,
          .wait_ns = n,
          .data_ns = n,
          .status = counted ? StepStatus::ok : StepStatus::timeout,
          .counted = counted,
          .participants = static_cast<std::uint32_t>(number + 3),
          .tries = static_cast<std::uint32_t>(number + 4)};
}

std::uint64_t count_of(const Durations& durations) {
  std::uint64_t count = 0;
  for (const auto in_bucket : durations.in_bucket) count += in_bucket;
  return count;
}

/// Whether these are the totals after `recorded` records.
bool are_totals_of(const StepTotals& totals, std::uint64_t recorded) {
  std::uint64_t counted = 0, sum = 0;
  for (std::uint64_t number = 1; number <= recorded; ++number) {
    if (record_numbered(number).counted == 0) continue;
    ++counted;
    sum += number;
  }
  return totals.calls[static_cast<int>(StepStatus::ok)] == counted &&
         totals.calls[static_cast<int>(StepStatus::timeout)] == recorded - counted &&
         count_of(totals.duration) == counted && count_of(totals.wait) == counted &&
         totals.duration.sum_ns == static_cast<std::int64_t>(sum * 1'000'000) &&
         totals.wait.sum_ns == static_cast<std::int64_t>(sum) &&
         (counted == 0 || totals.last_loss == double(recorded % 3 == 0 ? recorded - 1 : recorded) / 4);
}

struct Steps {
  static constexpr std::uint64_t most = max_step_records;
  struct Found {
    bool any;
    StepRecord record;
    StepTotals totals;
  };

  static void append(Session& session, std::uint64_t count) {
    for (; count > 0; --count) record_step(session, record_numbered(recorded_steps(session) + 1));
  }
  static std::uint64_t recorded(Session& session) { return recorded_steps(session); }
  static std::uint64_t first(std::uint64_t recorded) { return first_step_record(recorded); }
  static std::optional<StepRecord> numbered(Session& session, std::uint64_t number) {
    return step_record(session, number);
  }
  static bool is_made(const StepRecord& record, std::uint64_t number) {
    const auto expected = record_numbered(number);
    return std::memcmp(&record, &expected, sizeof record) == 0;
  }
  static std::string wrong_totals(Session& session, std::uint64_t recorded) {
    return are_totals_of(step_totals(session), recorded) ? "" : "the totals are wrong";
  }
  static bool is_of_another_process(Session&, std::uint64_t) { return true; }  // They do not say.
  static void read(Session& session, std::uint64_t number, Found& found) {
    const auto record = step_record(session, number);
    found.any = record.has_value();
    if (record) found.record = *record;
    found.totals = step_totals(session);
  }
  static bool is_right(Session& session, const Found& found, std::uint64_t number, std::uint64_t recorded) {
    const auto in_totals = found.totals.calls[0] + found.totals.calls[static_cast<int>(StepStatus::timeout)];
    return (!found.any || is_made(found.record, number)) && in_totals >= recorded &&
           in_totals <= recorded_steps(session) && are_totals_of(found.totals, in_totals);
  }
};

TEST(StepHistory, HasTheLastStepsAndTheTotalsOfAll) { expect_the_last_ones<Steps>(); }

TEST(StepHistory, DurationsAreCountedUpToTheBoundsOfTheirBuckets) {
  auto [manifest, session] = small_session(1, {10});
  StepRecord record{};
  record.counted = 1;
  for (const auto ns :
       {std::int64_t{0}, duration_bounds_ns[3], duration_bounds_ns[3] + 1, duration_bounds_ns.back() + 1}) {
    record.duration_ns = ns;
    record_step(session, record);
  }
  const auto totals = step_totals(session);
  EXPECT_EQ(totals.duration.in_bucket[0], 1u);
  EXPECT_EQ(totals.duration.in_bucket[3], 1u);
  EXPECT_EQ(totals.duration.in_bucket[4], 1u);
  EXPECT_EQ(totals.duration.in_bucket[duration_bounds_ns.size()], 1u);
  EXPECT_EQ(totals.compute.in_bucket[0], 4u);
}

TEST(StepHistory, AnotherThreadReadsWhatWasWrittenOrNothing) {
  expect_another_thread_is_not_misled<Steps>(20'000, [](Session& session) {
    // Buckets and sum are of the same records: their durations are whole milliseconds.
    const auto totals = step_totals(session);
    ASSERT_EQ(count_of(totals.duration), totals.calls[static_cast<int>(StepStatus::ok)]);
    ASSERT_EQ(totals.duration.sum_ns % 1'000'000, 0);
    ASSERT_EQ(totals.duration.sum_ns, 2 * totals.compute.sum_ns);
  });
}

class StepHistoryByInstruction : public ByInstruction {};

// The whole check takes longer than the host: at every place once in a while.
TEST_F(StepHistoryByInstruction, AReaderIsNeverMisledByAHostThatStandsOrIsKilled) {
  expect_not_misled_by_one_that_stands<Steps>(16);
}

TEST_F(StepHistoryByInstruction, TheNextHostGoesOnAfterOneThatWasKilled) {
  expect_the_next_goes_on<Steps>(3000);
}

TEST_F(StepHistoryByInstruction, AReaderThatIsOvertakenReadsNothingWrong) {
  expect_one_that_is_overtaken_reads_nothing_wrong<Steps>(800);
}

}  // namespace
}  // namespace accelmgr::session
