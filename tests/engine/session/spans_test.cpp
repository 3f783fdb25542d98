// What is seen of the spans of a thread while it writes them, after it was killed, and when another process
// goes on in its ring.
#include "engine/session/spans.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "by_instruction.hpp"
#include "engine/session/views.hpp"
#include "session_support.hpp"

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

void append(SpanRing& ring, std::uint64_t count) {
  const SpanWriter writer(ring);
  for (; count > 0; --count) writer.record(made(recorded_spans(ring) + 1));
}

bool is_made(Span span, std::uint64_t number) {
  span.pid = 0;
  const auto expected = made(number);
  return std::memcmp(&span, &expected, sizeof span) == 0;
}

/// Returns what is wrong with the spans that a reader finds, or an empty text. The ring must have recorded at
/// least `least` spans. `moving`: its thread goes on to write.
std::string wrong(const SpanRing& ring, std::uint64_t least, bool moving = false) {
  const auto recorded = recorded_spans(ring);
  if (recorded < least) return "spans are gone";
  for (auto number = first_span(recorded); number <= recorded; ++number) {
    const auto span = span_numbered(ring, number);
    if (!span && !moving) return "span " + std::to_string(number) + " is not there";
    if (span && !is_made(*span, number)) return "span " + std::to_string(number) + " is not what was written";
  }
  if (span_numbered(ring, 0)) return "there is a span 0";
  if (!moving && span_numbered(ring, recorded + 1)) return "there is a span that nobody has written";
  if (!moving && span_numbered(ring, first_span(recorded) - 1)) return "an old span is still there";
  return {};
}

SpanRing& ring_of(Session& session) { return RunnerView(session, 0).spans(); }

TEST(Spans, ARingHasTheLastOnes) {
  auto [manifest, session] = small_session(1, {10});
  auto& ring = ring_of(session);
  EXPECT_EQ(wrong(ring, 0), "");
  for (const std::uint64_t recorded : {1ul, 2ul, max_spans - 1, max_spans, max_spans + 1, 3 * max_spans}) {
    append(ring, recorded - recorded_spans(ring));
    EXPECT_EQ(wrong(ring, recorded), "") << recorded << " spans";
    EXPECT_EQ(recorded - first_span(recorded) + 1, std::min(recorded, max_spans));
  }
  EXPECT_EQ(span_numbered(ring, 3 * max_spans)->pid, getpid());
}

TEST(Spans, EachThreadHasARingOfItsOwn) {
  auto [manifest, session] = small_session(3, {10});
  append(HostView(session).spans(), 1);
  append(SupervisorView(session).spans(), 2);
  append(LoaderView(session).spans(), 3);
  append(CheckpointView(session).spans(), 4);
  for (int rank = 0; rank < 3; ++rank)
    append(RunnerView(session, rank).spans(), 5 + static_cast<std::uint64_t>(rank));
  const std::uint64_t expected[] = {5, 6, 7, 1, 2, 3, 4};
  ASSERT_EQ(span_rings(session.ranks()), std::size(expected));
  for (std::size_t ring = 0; ring < std::size(expected); ++ring)
    EXPECT_EQ(recorded_spans(session.span_ring(ring)), expected[ring]) << "ring " << ring;
}

TEST(Spans, OfOneActivityAfterTheOtherTouch) {
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

TEST(Spans, AScopeIsASpanAroundThoseWithinIt) {
  auto [manifest, session] = small_session(1, {10});
  auto& ring = ring_of(session);
  const SpanWriter writer(ring);
  {
    SpanScope outer(writer, Activity::step, 7);
    outer.set_attempt(9);
    const SpanScope inner(writer, Activity::assemble, 7);
  }
  const auto inner = *span_numbered(ring, 1), outer = *span_numbered(ring, 2);
  EXPECT_EQ(inner.activity, Activity::assemble);
  EXPECT_EQ(outer.activity, Activity::step);
  EXPECT_EQ(outer.attempt, 9u);
  EXPECT_LE(outer.begin_ns, inner.begin_ns);
  EXPECT_LE(inner.begin_ns, inner.end_ns);
  EXPECT_LE(inner.end_ns, outer.end_ns);
}

TEST(Spans, AnotherThreadReadsWhatWasWrittenOrNothing) {
  auto [manifest, session] = small_session(1, {10});
  auto& ring = ring_of(session);
  constexpr std::uint64_t spans = 200'000;
  std::jthread writer([&ring] { append(ring, spans); });
  std::uint64_t last = 0;
  while (last < spans) {
    ASSERT_EQ(wrong(ring, last, /*moving=*/true), "") << "after " << last << " spans";
    last = recorded_spans(ring);
  }
}

TEST(Spans, RandomReadersOfRandomRingsFindWhatIsThere) {
  EXPECT_TRUE(rc::check([] {
    auto [manifest, session] = small_session(1, {10});
    auto& ring = ring_of(session);
    std::uint64_t recorded = 0;
    for (const auto more : *rc::gen::container<std::vector<std::uint64_t>>(rc::gen::oneOf(
             rc::gen::inRange<std::uint64_t>(0, 5), rc::gen::inRange(max_spans - 2, max_spans + 3)))) {
      append(ring, more);
      recorded += more;
      RC_ASSERT(wrong(ring, recorded).empty());
      const auto number = *rc::gen::inRange<std::uint64_t>(0, recorded + 3);
      const bool there = number > 0 && number <= recorded && number + max_spans > recorded;
      RC_ASSERT(span_numbered(ring, number).has_value() == there);
    }
  }));
}

class SpansByInstruction : public ByInstruction {};

// The writer runs an instruction at a time. What a reader finds after each is what a death there would leave.
TEST_F(SpansByInstruction, AReaderIsNeverMisledByAWriterThatStandsOrIsKilled) {
  for (const std::uint64_t before : {std::uint64_t{0}, max_spans, max_spans + 500}) {
    auto [manifest, session] = small_session(1, {10});
    auto& ring = ring_of(session);
    append(ring, before);
    SteppedProcess writer([&ring] { append(ring, 1); });
    std::uint64_t instructions = 0;
    while (writer.step()) {
      ++instructions;
      ASSERT_EQ(wrong(ring, before), "") << instructions << " instructions";
    }
    ASSERT_GT(instructions, 20u);
    ASSERT_EQ(recorded_spans(ring), before + 1);
    ASSERT_EQ(wrong(ring, before + 1), "");
  }
}

TEST_F(SpansByInstruction, TheNextProcessGoesOnAfterOneThatWasKilled) {
  EXPECT_TRUE(rc::check([] {
    auto [manifest, session] = small_session(1, {10});
    auto& ring = ring_of(session);
    append(ring, *rc::gen::inRange<std::uint64_t>(0, 2 * max_spans));
    for (int i = *rc::gen::inRange(1, 4); i > 0; --i) {
      const auto before = recorded_spans(ring);
      SteppedProcess writer([&ring] { append(ring, 3); });
      writer.step(*rc::gen::inRange<std::uint64_t>(0, 300));
      writer.kill();
      RC_ASSERT(wrong(ring, before).empty());
      const auto left = recorded_spans(ring);
      RC_ASSERT(left <= before + 3);
      if (left > before) RC_ASSERT(span_numbered(ring, left)->pid != getpid());
      append(ring, *rc::gen::inRange<std::uint64_t>(0, 300));
      RC_ASSERT(wrong(ring, left).empty());
    }
  }));
}

struct Found {
  bool any;
  Span span;
};

// The reader runs an instruction at a time, and spans are written in between.
TEST_F(SpansByInstruction, AReaderThatIsOvertakenReadsNothingWrong) {
  EXPECT_TRUE(rc::check([] {
    auto [manifest, session] = small_session(1, {sizeof(Found)});
    auto& ring = ring_of(session);
    append(ring, *rc::gen::inRange<std::uint64_t>(1, 2 * max_spans));
    auto* found = reinterpret_cast<Found*>(session.parameters());  // Memory that the reader shares.
    const auto recorded = recorded_spans(ring);
    const auto number = *rc::gen::inRange(first_span(recorded), recorded + 1);
    SteppedProcess reader([&ring, found, number] {
      const auto span = span_numbered(ring, number);
      found->any = span.has_value();
      if (span) found->span = *span;
    });
    for (int i = *rc::gen::inRange(1, 8); i > 0; --i) {
      reader.step(*rc::gen::inRange<std::uint64_t>(1, 40));
      append(ring, *rc::gen::element<std::uint64_t>(1, 2, 3, max_spans - 1, max_spans, max_spans + 1));
    }
    while (reader.step()) {
    }
    RC_ASSERT(!found->any || is_made(found->span, number));
  }));
}

}  // namespace
}  // namespace accelmgr::session
