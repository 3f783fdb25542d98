// Tests of records that one process writes to a ring in a session, and that others read meanwhile: steps and
// spans. What a reader finds is what was written or nothing, also after the writer was killed.
//
// A Ring has
//   most                              how many records it keeps
//   Found                             what a reader has found, in shared memory
//   append(session, count)            adds records, whose fields follow from their numbers
//   recorded(session), first(recorded), numbered(session, number)   as the code under test
//   is_made(record, number)           whether that is the record with that number
//   is_of_another_process(session, number)   false if it says that this process has written it
//   wrong_totals(session, recorded)   what else is wrong when nobody writes, or an empty text
//   read(session, number, found), is_right(session, found, number, recorded)   by a reader that is overtaken
#pragma once

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <string>
#include <thread>

#include "by_instruction.hpp"
#include "session_support.hpp"

namespace accelmgr::session {

/// Returns what is wrong with the records that a reader finds, or an empty text. The ring must have at least
/// `least`. `moving`: a process goes on to write.
template <class Ring>
std::string wrong(Session& session, std::uint64_t least, bool moving = false) {
  const auto recorded = Ring::recorded(session);
  if (recorded < least) return "records are gone";
  for (auto number = Ring::first(recorded); number <= recorded; ++number) {
    const auto record = Ring::numbered(session, number);
    if (!record && !moving) return "record " + std::to_string(number) + " is not there";
    if (record && !Ring::is_made(*record, number))
      return "record " + std::to_string(number) + " is not what was written";
  }
  if (Ring::numbered(session, 0)) return "there is a record 0";
  if (moving) return {};
  if (Ring::numbered(session, recorded + 1)) return "there is a record that nobody has written";
  if (Ring::numbered(session, Ring::first(recorded) - 1)) return "an old record is still there";
  return Ring::wrong_totals(session, recorded);
}

template <class Ring>
void expect_the_last_ones() {
  auto [manifest, session] = small_session(1, {10});
  EXPECT_EQ(wrong<Ring>(session, 0), "");
  EXPECT_EQ(Ring::first(0), 1u);
  constexpr std::uint64_t most = Ring::most;
  for (const std::uint64_t recorded :
       {std::uint64_t{1}, std::uint64_t{2}, most - 1, most, most + 1, 3 * most}) {
    Ring::append(session, recorded - Ring::recorded(session));
    EXPECT_EQ(wrong<Ring>(session, recorded), "") << recorded << " records";
    EXPECT_EQ(recorded - Ring::first(recorded) + 1, std::min(recorded, most));
  }
}

/// `look` looks at more, meanwhile.
template <class Ring, class Look>
void expect_another_thread_is_not_misled(std::uint64_t records, Look look) {
  auto [manifest, session] = small_session(1, {10});
  std::jthread writer([&session = session, records] { Ring::append(session, records); });
  for (std::uint64_t last = 0; last < records; last = Ring::recorded(session)) {
    ASSERT_EQ(wrong<Ring>(session, last, /*moving=*/true), "") << "after " << last << " records";
    look(session);
  }
}

/// The writer runs an instruction at a time. What a reader finds is what a death there would leave. It looks
/// after every `each` instructions.
template <class Ring>
void expect_not_misled_by_one_that_stands(std::uint64_t each) {
  for (const std::uint64_t before : {std::uint64_t{0}, Ring::most, Ring::most + Ring::most / 2}) {
    auto [manifest, session] = small_session(1, {10});
    Ring::append(session, before);
    SteppedProcess writer([&session = session] { Ring::append(session, 1); });
    std::uint64_t instructions = 0;
    while (writer.step())
      if (++instructions % each == 0) {
        ASSERT_EQ(wrong<Ring>(session, before), "") << instructions << " instructions";
      }
    ASSERT_GT(instructions, 20u);
    ASSERT_EQ(Ring::recorded(session), before + 1);
    ASSERT_EQ(wrong<Ring>(session, before + 1), "");
  }
}

/// The writer is killed within `instructions` instructions.
template <class Ring>
void expect_the_next_goes_on(std::uint64_t instructions) {
  EXPECT_TRUE(rc::check([=] {
    auto [manifest, session] = small_session(1, {10});
    Ring::append(session, *rc::gen::inRange<std::uint64_t>(0, 2 * Ring::most));
    for (int i = *rc::gen::inRange(1, 4); i > 0; --i) {
      const auto before = Ring::recorded(session);
      const auto records = *rc::gen::inRange<std::uint64_t>(1, 4);
      SteppedProcess writer([&session = session, records] { Ring::append(session, records); });
      writer.step(*rc::gen::inRange<std::uint64_t>(0, instructions));
      writer.kill();
      RC_ASSERT(wrong<Ring>(session, before).empty());
      const auto left = Ring::recorded(session);
      RC_ASSERT(left <= before + records);
      if (left > before) RC_ASSERT(Ring::is_of_another_process(session, left));
      Ring::append(session, *rc::gen::inRange<std::uint64_t>(0, 300));
      RC_ASSERT(wrong<Ring>(session, left).empty());
    }
  }));
}

/// The reader runs `instructions` at most, and records are written in between.
template <class Ring>
void expect_one_that_is_overtaken_reads_nothing_wrong(std::uint64_t instructions) {
  using Found = typename Ring::Found;
  EXPECT_TRUE(rc::check([=] {
    constexpr std::uint64_t most = Ring::most;
    auto [manifest, session] = small_session(1, {sizeof(Found)});
    Ring::append(session, *rc::gen::inRange<std::uint64_t>(1, 2 * most));
    auto* found = reinterpret_cast<Found*>(session.parameters());  // Memory that the reader shares.
    const auto recorded = Ring::recorded(session);
    const auto number = *rc::gen::inRange(Ring::first(recorded), recorded + 1);
    SteppedProcess reader([&session = session, found, number] { Ring::read(session, number, *found); });
    for (int i = *rc::gen::inRange(1, 8); i > 0; --i) {
      reader.step(*rc::gen::inRange<std::uint64_t>(1, instructions));
      Ring::append(session,
                   *rc::gen::element<std::uint64_t>(1, 2, 3, most - 2, most - 1, most, most + 1, most + 2));
    }
    while (reader.step()) {
    }
    RC_ASSERT(Ring::is_right(session, *found, number, recorded));
  }));
}

}  // namespace accelmgr::session
