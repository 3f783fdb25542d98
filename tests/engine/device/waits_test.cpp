// Every wait of the transport is needed, and the ones that are there are enough: with each left out in turn,
// some order of execution gives wrong numbers; with all of them no order does.
#include <gtest/gtest.h>

#include "rig.hpp"

namespace accelmgr::test {
namespace {

constexpr std::uint64_t seeds = 40;

/// Makes three attempts of two micro-batches, and leaves the second attempt unfinished. Returns whether the
/// other two have the right gradients and loss.
bool right(Rig& rig) {
  bool right = true;
  const auto attempt = [&](float value, float added) {
    rig.begin(value);
    rig.micro_batch(added, true, false);
    rig.micro_batch(2, false, true);
  };
  const auto check = [&](float value) {
    EXPECT_TRUE(rig.copies->finish());
    right = right && *Rig::floats(rig.loss) == 2 * value;
    for (std::size_t i = 0; i < rig.size(); ++i)
      right = right && rig.sink.seen[i] == rig.expected(i, 2 * value + 3 + float(i));
  };
  attempt(10, 1);
  check(10);
  attempt(20, 5);  // Left. It may meet the parameters of the next one, but not its batches.
  attempt(30, 1);
  check(30);
  return right;
}

Rig::Options with(std::uint64_t seed, bool records = false) {
  return {.seed = seed, .counts = {300'000, 5, 300'000, 1}, .records = records};
}

TEST(Waits, EndTheCopiesOfAnAttemptThatWasLeftBeforeTheirMemoryIsGivenBack) {
  for (const bool copies_first : {true, false}) {
    Rig rig(with(0));
    rig.begin(1);
    rig.micro_batch(1, true, true);
    if (copies_first) rig.copies.reset();
    rig.upload.reset();
    rig.copies.reset();
    EXPECT_EQ(rig.fake.early_unregistrations(), 0);
    EXPECT_EQ(rig.fake.held().registrations, 0u);
  }
}

std::set<FakeCuda::Wait> all_waits(bool records) {
  Rig rig(with(0, records));
  right(rig);
  return rig.fake.waits();
}

TEST(Waits, AreEnoughForEveryOrderOfExecution) {
  for (const bool records : {false, true})
    for (std::uint64_t seed = 0; seed < seeds; ++seed) {
      Rig rig(with(seed, records));
      EXPECT_TRUE(right(rig)) << seed;
      EXPECT_EQ(rig.fake.unregistered_copies(), 0);
    }
}

TEST(Waits, AreAllNeeded) {
  for (const bool records : {false, true}) {
    const auto waits = all_waits(records);
    // The compute stream waits for parameters. For each of two buckets, in the first order and in the second,
    // the copy stream waits and the host waits; in a graph the copy stream waits for the same event in both
    // orders. The host waits for the compute stream.
    EXPECT_EQ(waits.size(), 1 + (records ? 2 : 2 * 2) + 2 * 2 + 1);
    for (const auto& wait : waits) {
      bool wrong = false;
      for (std::uint64_t seed = 0; seed < seeds && !wrong; ++seed) {
        Rig rig(with(seed, records));
        rig.fake.leave_out(wait);
        wrong = !right(rig);
      }
      EXPECT_TRUE(wrong) << "of " << wait.waiter << " for event " << wait.event
                         << (records ? ", recorded" : "");
    }
  }
}

}  // namespace
}  // namespace accelmgr::test
