// Checks that a rank which is killed after any instruction leaves the step counted in full or not at all.
// Stores become visible in program order, so the other processes find exactly what the dead process had
// stored. The test runs a rank one instruction at a time. After each one the shared memory is what a death at
// that instant would leave. The test recovers from it, compares the outcome with that of the undisturbed run,
// and puts the memory back for the next instruction.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "by_instruction.hpp"
#include "engine/session/kernels.hpp"
#include "small_step.hpp"

namespace accelmgr::session {

namespace {

class EveryInstruction : public ByInstruction, public testing::WithParamInterface<Death> {
 protected:
  /// Runs `work` to its end in a process of its own. Before it begins and after every `each` instructions,
  /// calls `look` on the memory that its death would leave, then puts the memory back. Returns the number of
  /// instructions.
  template <class Work, class Look>
  std::uint64_t step_through(Work work, std::uint64_t each, Look look) {
    SteppedProcess process(work);
    std::uint64_t instructions = 0;
    SmallStep::Image image;
    do {
      step_.take(image);
      look();
      step_.put_back(image);
      instructions += each;
    } while (process.step(each));
    return instructions;
  }

  std::uint64_t instructions_of_section() {
    SmallStep::Image start;
    step_.take(start);
    SteppedProcess process([&] { step_.run_section(); });
    std::uint64_t instructions = 0;
    while (process.step()) ++instructions;
    step_.put_back(start);
    return instructions;
  }

  SmallStep step_{GetParam()};
};

TEST_P(EveryInstruction, ADeathLeavesTheStepCountedInFullOrNotAtAll) {
  ASSERT_EQ(step_.undisturbed_wrong(), "");
  std::uint64_t counted = 0, not_counted = 0, wrong = 0;
  std::string first_wrong;
  const auto instructions =
      step_through([&] { step_.run_section(); }, 1,
                   [&] {
                     const bool committed = step_.committed();
                     ++(committed ? counted : not_counted);
                     step_.recover();
                     const auto what = step_.wrong(committed);
                     if (!what.empty() && wrong++ == 0)
                       first_wrong = fmt::format("after look {}: {}", counted + not_counted, what);
                   });
  fmt::print("{} instructions: {} deaths not counted, {} counted\n", instructions, not_counted, counted);
  EXPECT_EQ(wrong, 0u) << first_wrong;
  EXPECT_EQ(not_counted > 0, GetParam().section == Section::last_vote);
  EXPECT_GT(counted, 10u);
}

// The tests look at the memory of a stopped process. This one checks that a killed process leaves the same.
TEST_P(EveryInstruction, AKilledProcessLeavesWhatTheStoppedOneHad) {
  constexpr std::uint64_t kills = 5;
  const auto instructions = instructions_of_section();
  SmallStep::Image start, stopped, killed;
  step_.take(start);
  for (std::uint64_t k = 0; k < kills; ++k) {
    SteppedProcess process([&] { step_.run_section(); });
    ASSERT_TRUE(process.step(instructions * (2 * k + 1) / (2 * kills)));
    step_.take(stopped);
    process.kill();
    step_.take(killed);
    EXPECT_TRUE(killed == stopped);
    const bool committed = step_.committed();
    step_.recover();
    EXPECT_EQ(step_.wrong(committed), "") << "killed after " << k << "/" << kills << " of its instructions";
    step_.put_back(start);
  }
}

std::string name_of(const testing::TestParamInfo<Death>& info) {
  const auto& death = info.param;
  return fmt::format("Rank{}Of{}{}{}{}{}", death.rank, death.ranks,
                     death.accumulate ? "Accumulating" : "Overwriting",
                     death.section == Section::last_vote ? "FromItsVote" : "ToTheClosing",
                     death.is_mixed ? "Mixed" : "", death.updates ? "Updating" : "");
}

std::vector<Death> every_death() {
  std::vector<Death> deaths;
  for (const auto section : {Section::last_vote, Section::last_slice})
    for (const bool accumulate : {true, false})
      for (const int ranks : {2, 3})
        for (int rank = 0; rank < ranks; ++rank) deaths.push_back({ranks, rank, accumulate, section});
  for (const bool accumulate : {true, false})
    for (const int rank : {0, 1}) deaths.push_back({2, rank, accumulate, Section::last_slice, true});
  for (const int rank : {0, 1, 2}) deaths.push_back({3, rank, false, Section::last_slice, false, true});
  for (const int rank : {0, 1}) deaths.push_back({2, rank, false, Section::last_slice, true, true});
  deaths.push_back({2, 1, true, Section::last_vote, false, true});
  return deaths;
}

INSTANTIATE_TEST_SUITE_P(Deaths, EveryInstruction, testing::ValuesIn(every_death()), name_of);

class EveryInstructionOfRecovery : public EveryInstruction {};

// The process that recovers is killed as well, and a third one finishes.
TEST_P(EveryInstructionOfRecovery, ASecondDeathChangesNothing) {
  constexpr std::uint64_t first_deaths = 4;
  const auto instructions = instructions_of_section();
  std::uint64_t looks = 0, wrong = 0;
  std::string first_wrong;
  step_through([&] { step_.run_section(); }, std::max<std::uint64_t>(1, instructions / first_deaths),
               [&] {
                 const bool committed = step_.committed();
                 step_through([&] { step_.recover(); }, 23,
                              [&] {
                                ++looks;
                                const bool still = step_.committed();
                                step_.recover();
                                const auto what = still == committed ? step_.wrong(committed)
                                                                     : "recovery changed whether it counts";
                                if (!what.empty() && wrong++ == 0) first_wrong = what;
                              });
               });
  fmt::print("{} second deaths\n", looks);
  EXPECT_EQ(wrong, 0u) << first_wrong;
  EXPECT_GT(looks, 300u);
}

// Shows that these tests can fail: without the image a chunk is added or updated twice.
TEST_P(EveryInstructionOfRecovery, LeavingTheUndoImageOutIsFound) {
  std::uint64_t looks = 0, wrong = 0;
  step_through([&] { step_.run_section(); }, 1,
               [&] {
                 const bool committed = step_.committed();
                 step_.recover_without_undo();
                 ++looks;
                 wrong += !step_.wrong(committed).empty();
               });
  fmt::print("{} of {} deaths leave a wrong master\n", wrong, looks);
  EXPECT_GT(wrong, 0u);
}

INSTANTIATE_TEST_SUITE_P(Deaths, EveryInstructionOfRecovery,
                         testing::Values(Death{2, 1, true, Section::last_slice},
                                         Death{3, 0, true, Section::last_slice},
                                         Death{3, 1, true, Section::last_vote},
                                         Death{2, 1, true, Section::last_slice, true},
                                         Death{2, 1, false, Section::last_slice, false, true},
                                         Death{2, 0, false, Section::last_slice, true, true}),
                         name_of);

}  // namespace
}  // namespace accelmgr::session
