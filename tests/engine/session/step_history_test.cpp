// What those who watch a session see of its last steps, while a host writes them, and after it was killed.
#include "engine/session/step_history.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <algorithm>

#include <cstring>
#include <thread>

#include "by_instruction.hpp"
#include "session_support.hpp"

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

void append(Session& session, std::uint64_t count) {
  for (; count > 0; --count) record_step(session, record_numbered(recorded_steps(session) + 1));
}

bool same(const StepRecord& a, const StepRecord& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

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

/// Reads the history, which must have at least `least` records. Returns the first defect as text, or an empty
/// string. `moving`: a host adds records meanwhile.
std::string wrong(const Session& session, std::uint64_t least, bool moving = false) {
  const auto recorded = recorded_steps(session);
  if (recorded < least) return "records are gone";
  for (auto number = first_step_record(recorded); number <= recorded; ++number) {
    const auto record = step_record(session, number);
    if (!record && !moving) return "record " + std::to_string(number) + " is not there";
    if (record && !same(*record, record_numbered(number)))
      return "record " + std::to_string(number) + " is not what was written";
  }
  if (step_record(session, 0)) return "there is a record 0";
  if (!moving && step_record(session, recorded + 1)) return "there is a record that nobody has written";
  if (!moving && step_record(session, first_step_record(recorded) - 1)) return "an old record is still there";
  if (!moving && !are_totals_of(step_totals(session), recorded)) return "the totals are wrong";
  return {};
}

TEST(StepHistory, HasTheLastStepsAndTheTotalsOfAll) {
  auto [manifest, session] = small_session(1, {10});
  EXPECT_EQ(wrong(session, 0), "");
  EXPECT_EQ(first_step_record(0), 1u);
  for (const std::uint64_t recorded : {1, 2, 255, 256, 257, 258, 600}) {
    append(session, recorded - recorded_steps(session));
    EXPECT_EQ(wrong(session, recorded), "") << recorded << " records";
    EXPECT_EQ(recorded - first_step_record(recorded) + 1, std::min(recorded, max_step_records));
  }
}

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
  auto [manifest, session] = small_session(1, {10});
  constexpr std::uint64_t records = 20'000;
  std::jthread host([&session = session] { append(session, records); });
  std::uint64_t last = 0;
  while (last < records) {
    const auto found = wrong(session, last, /*moving=*/true);
    ASSERT_EQ(found, "") << "after " << last << " records";
    last = recorded_steps(session);
    // Buckets and sum are of the same records: their durations are whole milliseconds.
    const auto totals = step_totals(session);
    const auto counted = totals.calls[static_cast<int>(StepStatus::ok)];
    ASSERT_EQ(count_of(totals.duration), counted);
    ASSERT_EQ(totals.duration.sum_ns % 1'000'000, 0);
    ASSERT_EQ(totals.duration.sum_ns, 2 * totals.compute.sum_ns);
  }
}

class StepHistoryByInstruction : public ByInstruction {};

// The host runs an instruction at a time. What a reader finds after each is what a death there would leave.
TEST_F(StepHistoryByInstruction, AReaderIsNeverMisledByAHostThatStandsOrIsKilled) {
  for (const std::uint64_t before : {0, 256, 400}) {
    auto [manifest, session] = small_session(1, {10});
    append(session, before);
    SteppedProcess host([&session = session] { append(session, 1); });
    std::uint64_t instructions = 0;
    while (host.step()) {
      // The whole check takes longer than the host: at every place once in a while.
      if (++instructions % 16 == 0) {
        ASSERT_EQ(wrong(session, before), "") << instructions << " instructions";
      }
    }
    ASSERT_EQ(recorded_steps(session), before + 1);
    ASSERT_EQ(wrong(session, before + 1), "");
  }
}

TEST_F(StepHistoryByInstruction, TheNextHostGoesOnAfterOneThatWasKilled) {
  EXPECT_TRUE(rc::check([] {
    auto [manifest, session] = small_session(1, {10});
    append(session, *rc::gen::inRange<std::uint64_t>(0, 600));
    const auto hosts = *rc::gen::inRange(1, 4);
    for (int i = 0; i < hosts; ++i) {
      const auto before = recorded_steps(session);
      const auto records = *rc::gen::inRange<std::uint64_t>(1, 4);
      SteppedProcess host([&session = session, records] { append(session, records); });
      host.step(*rc::gen::inRange<std::uint64_t>(0, 3000));
      host.kill();
      RC_ASSERT(wrong(session, before).empty());
      const auto left = recorded_steps(session);
      RC_ASSERT(left <= before + records);
      append(session, *rc::gen::inRange<std::uint64_t>(0, 300));
      RC_ASSERT(wrong(session, left).empty());
    }
  }));
}

struct Found {
  bool any;
  StepRecord record;
  StepTotals totals;
};

// The reader runs an instruction at a time, and steps are made in between.
TEST_F(StepHistoryByInstruction, AReaderThatIsOvertakenReadsNothingWrong) {
  EXPECT_TRUE(rc::check([] {
    auto [manifest, session] = small_session(1, {sizeof(Found)});
    append(session, *rc::gen::inRange<std::uint64_t>(1, 600));
    auto* found = reinterpret_cast<Found*>(session.parameters());  // Memory that the reader shares.
    const auto recorded = recorded_steps(session);
    const auto number = *rc::gen::inRange(first_step_record(recorded), recorded + 1);
    SteppedProcess reader([&session = session, found, number] {
      const auto record = step_record(session, number);
      found->any = record.has_value();
      if (record) found->record = *record;
      found->totals = step_totals(session);
    });
    for (int i = *rc::gen::inRange(1, 8); i > 0; --i) {
      reader.step(*rc::gen::inRange<std::uint64_t>(1, 800));
      append(session, *rc::gen::element<std::uint64_t>(1, 2, 3, 254, 255, 256, 257, 258));
    }
    while (reader.step()) {
    }
    const auto read = *found;
    RC_ASSERT(!read.any || same(read.record, record_numbered(number)));
    const auto in_totals = read.totals.calls[0] + read.totals.calls[static_cast<int>(StepStatus::timeout)];
    RC_ASSERT(in_totals >= recorded && in_totals <= recorded_steps(session));
    RC_ASSERT(are_totals_of(read.totals, in_totals));
  }));
}

}  // namespace
}  // namespace accelmgr::session
