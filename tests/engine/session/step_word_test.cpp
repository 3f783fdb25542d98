#include "engine/session/step_word.hpp"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace accelmgr::session {
namespace {

constexpr RankMask three = 0b111;

std::uint64_t opened(std::atomic<std::uint64_t>& word) {
  word = initial_step_word;
  return open(word);
}

TEST(StepWord, EncodesEveryFieldWithoutTouchingItsNeighbours) {
  for (std::uint64_t attempt : {0ull, 1ull, (1ull << 37) - 1})
    for (std::uint32_t mask : {0u, 1u, 0xffffffu})
      for (int bits = 0; bits < 8; ++bits) {
        const StepWord w{attempt, std::uint32_t(bits & 1), (bits & 2) != 0, (bits & 4) != 0, mask};
        EXPECT_EQ(decode(encode(w)), w);
      }
}

TEST(StepWord, TheLastVoteCommitsAndClosingFlipsTheIndex) {
  std::atomic<std::uint64_t> word;
  const auto attempt = opened(word);
  EXPECT_EQ(vote(word, attempt, 2, three), Vote::counted);
  EXPECT_EQ(vote(word, attempt, 0, three), Vote::counted);
  EXPECT_FALSE(close(word, attempt, three)) << "an attempt that computes cannot be closed";
  EXPECT_EQ(vote(word, attempt, 1, three), Vote::committed);
  EXPECT_FALSE(abort(word, attempt, author_host, three)) << "a committed attempt counts";
  EXPECT_EQ(load(word).index, 0u);
  EXPECT_TRUE(close(word, attempt, three));
  EXPECT_EQ(load(word).index, 1u);
  EXPECT_FALSE(close(word, attempt, three)) << "a late closing changes nothing";
  EXPECT_EQ(load(word).index, 1u);
}

TEST(StepWord, AnAbortKeepsTheIndexAndNamesItsAuthorAndTheNextAttemptHearsNothingOfIt) {
  std::atomic<std::uint64_t> word;
  const auto attempt = opened(word);
  EXPECT_EQ(open(word), 0u);
  EXPECT_EQ(vote(word, attempt, 0, three), Vote::counted);
  EXPECT_TRUE(abort(word, attempt, author_supervisor, three));
  EXPECT_FALSE(abort(word, attempt, author_host, three));
  EXPECT_EQ(load(word).mask, author_supervisor);
  EXPECT_EQ(vote(word, attempt, 1, three), Vote::over);
  EXPECT_EQ(open(word), 0u) << "it is not closed";
  EXPECT_TRUE(close(word, attempt, three));
  EXPECT_EQ(load(word).index, 0u);
  ASSERT_EQ(open(word), attempt + 1);
  const auto before = word.load();
  EXPECT_EQ(vote(word, attempt, 1, three), Vote::over);
  EXPECT_FALSE(abort(word, attempt, author_host, three));
  EXPECT_FALSE(close(word, attempt, three));
  EXPECT_EQ(word.load(), before);
}

// In every interleaving of the threads the attempt ends committed or aborted, never both, and exactly one
// call reports it.
TEST(StepWord, RacingVotesAndAbortsHaveOneWinner) {
  std::atomic<std::uint64_t> word{initial_step_word};
  for (int round = 0; round < 300; ++round) {
    const auto attempt = open(word);
    ASSERT_NE(attempt, 0u);
    std::atomic<int> commits{0}, aborts{0}, closes{0};
    {
      std::vector<std::jthread> threads;
      for (int rank = 0; rank < 3; ++rank)
        threads.emplace_back([&, rank] { commits += vote(word, attempt, rank, three) == Vote::committed; });
      threads.emplace_back([&] { aborts += abort(word, attempt, author_host, three); });
    }
    EXPECT_EQ(commits + aborts, 1);
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < 3; ++i) threads.emplace_back([&] { closes += close(word, attempt, three); });
    }
    EXPECT_EQ(closes, 1);
  }
}

}  // namespace
}  // namespace accelmgr::session
