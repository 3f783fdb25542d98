// What is seen of the spans of a thread while it writes them, after it was killed, and when another process
// goes on in its ring.
#include "engine/session/spans.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <string>

#include "engine/session/views.hpp"
#include "ring_checks.hpp"

namespace accelmgr::session {
namespace {

/// A span all of whose fields but the process follow from its number.
Span made(std::uint64_t number) {
  const auto n = static_cast<std::int64_t>(number);
  return {.begin_ns = n * 1000,
          .end_ns = n * 1000 + 999,
          .step = number + 1,
          .attempt = number + 2,
          .pid = 0,
          .rank = static_cast<std::int16_t>(number % 24),
          .activity = static_cast<Activity>(1 + number % 19)};
}

SpanRing& ring_of(Session& session) { return RunnerView(session, 0).spans(); }

struct Spans {
  static constexpr std::uint64_t most = max_spans;
  struct Found {
    bool any;
    Span span;
  };

  static void append(Session& session, std::uint64_t count) {
    const SpanWriter writer(ring_of(session));
    for (; count > 0; --count) writer.record(made(recorded(session) + 1));
  }
  static std::uint64_t recorded(Session& session) { return recorded_spans(ring_of(session)); }
  static std::uint64_t first(std::uint64_t recorded) { return first_span(recorded); }
  static std::optional<Span> numbered(Session& session, std::uint64_t number) {
    return span_numbered(ring_of(session), number);
  }
  static bool is_made(Span span, std::uint64_t number) {
    span.pid = 0;
    const auto expected = made(number);
    return std::memcmp(&span, &expected, sizeof span) == 0;
  }
  static std::string wrong_totals(Session&, std::uint64_t) { return {}; }
  static bool is_of_another_process(Session& session, std::uint64_t number) {
    return numbered(session, number)->pid != getpid();
  }
  static void read(Session& session, std::uint64_t number, Found& found) {
    const auto span = numbered(session, number);
    found.any = span.has_value();
    if (span) found.span = *span;
  }
  static bool is_right(Session&, const Found& found, std::uint64_t number, std::uint64_t) {
    return !found.any || is_made(found.span, number);
  }
};

TEST(SpansOfARing, AreTheLastOnes) { expect_the_last_ones<Spans>(); }

TEST(SpansOfARing, OfOneActivityAfterTheOtherTouch) {
  auto [manifest, session] = small_session(1, {10});
  auto& ring = ring_of(session);
  ActivityWriter writer(ring);
  writer.enter(Activity::waiting, 10);
  EXPECT_EQ(recorded_spans(ring), 0u);
  writer.set_attempt(3, 4);  // It was for this attempt that it waited.
  writer.enter(Activity::forward, 20);
  writer.enter(Activity::none, 50);
  writer.enter(Activity::reduce, 70);
  writer.enter(Activity::waiting, 80);
  ASSERT_EQ(recorded_spans(ring), 3u);
  const Span expected[] = {{10, 20, 3, 4, getpid(), -1, Activity::waiting},
                           {20, 50, 3, 4, getpid(), -1, Activity::forward},
                           {70, 80, 3, 4, getpid(), -1, Activity::reduce}};
  for (std::uint64_t number = 1; number <= 3; ++number) {
    const auto span = *span_numbered(ring, number);
    EXPECT_EQ(std::memcmp(&span, &expected[number - 1], sizeof span), 0) << "span " << number;
  }
}

TEST(SpansOfARing, AnotherThreadReadsWhatWasWrittenOrNothing) {
  expect_another_thread_is_not_misled<Spans>(200'000, [](Session&) {});
}

class SpansByInstruction : public ByInstruction {};

TEST_F(SpansByInstruction, AReaderIsNeverMisledByAWriterThatStandsOrIsKilled) {
  expect_not_misled_by_one_that_stands<Spans>(1);
}

TEST_F(SpansByInstruction, TheNextProcessGoesOnAfterOneThatWasKilled) { expect_the_next_goes_on<Spans>(300); }

TEST_F(SpansByInstruction, AReaderThatIsOvertakenReadsNothingWrong) {
  expect_one_that_is_overtaken_reads_nothing_wrong<Spans>(60);
}

}  // namespace
}  // namespace accelmgr::session
