#include "engine/data/random.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

namespace accelmgr::data {
namespace {

TEST(Random, SeedStreamAndIndexEachMakeAnotherGenerator) {
  std::set<std::uint64_t> firsts;
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    for (std::uint64_t stream = 0; stream < 10; ++stream) {
      for (std::uint64_t index = 0; index < 10; ++index) firsts.insert(Random(seed, stream, index).next());
    }
  }
  EXPECT_EQ(firsts.size(), 1000U);
}

// The orders of elements that users have seen must not change with a release or a standard library.
TEST(Random, TheNumbersAreThoseOfSplitMix64) {
  EXPECT_EQ(base::mix(0x9e3779b97f4a7c15u), 0xe220a8397b1dcdafu);  // the published first output of seed 0
}

TEST(Random, NormalHasMeanZeroAndVarianceOne) {
  Random random(1);
  constexpr int count = 100'000;
  double sum = 0;
  double squares = 0;
  for (int i = 0; i < count; ++i) {
    const double x = random.normal();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / count, 0, 0.02);  // 6 standard errors
  EXPECT_NEAR(squares / count, 1, 0.02);
}

TEST(Random, ShuffleKeepsEveryItem) {
  std::vector<int> items(1000);
  std::iota(items.begin(), items.end(), 0);
  auto shuffled = items;
  Random(3).shuffle(std::span(shuffled));
  EXPECT_NE(shuffled, items);
  std::sort(shuffled.begin(), shuffled.end());
  EXPECT_EQ(shuffled, items);
}

TEST(Random, ShuffleMakesEveryOrderAlikeOften) {
  std::vector<int> counts(6);
  for (std::uint64_t seed = 0; seed < 6000; ++seed) {
    std::vector<int> items = {0, 1, 2};
    Random(seed).shuffle(std::span(items));
    ++counts[static_cast<std::size_t>(2 * items[0] + (items[1] > items[2] ? 1 : 0))];
  }
  for (const int count : counts) EXPECT_NEAR(count, 1000, 150);  // 5 standard errors
}

}  // namespace
}  // namespace accelmgr::data
