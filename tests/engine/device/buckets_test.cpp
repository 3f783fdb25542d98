#include "engine/device/buckets.hpp"

#include <gtest/gtest.h>

namespace accelmgr::device {
namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
using Buckets = std::vector<std::vector<std::size_t>>;

TEST(Buckets, BeginSmallAndGoOnLarge) {
  const std::vector<std::uint64_t> bytes{mib / 2, mib / 2, 10 * mib, 15 * mib, mib};
  EXPECT_EQ(plan_buckets(std::vector<std::size_t>{4, 3, 2, 1, 0}, bytes), (Buckets{{4}, {3, 2}, {1, 0}}));
  EXPECT_EQ(plan_buckets(std::vector<std::size_t>{0, 1, 2, 3, 4}, bytes), (Buckets{{0, 1}, {2, 3}, {4}}));
}

TEST(Buckets, EndWithTheGradientThatFillsThem) {
  const std::vector<std::uint64_t> bytes{1, 100 * mib, 1, 24 * mib, 2 * mib, 1};
  EXPECT_EQ(plan_buckets(std::vector<std::size_t>{0, 1, 2, 3, 4, 5}, bytes),
            (Buckets{{0, 1}, {2, 3, 4}, {5}}));
}

TEST(Buckets, HaveEveryGradientOnceInTheirOrder) {
  const std::vector<std::uint64_t> bytes{0, 3 * mib, 0, 30 * mib, 7 * mib, 0};
  const std::vector<std::size_t> order{3, 0, 5, 1, 2, 4};
  std::vector<std::size_t> joined;
  for (const auto& bucket : plan_buckets(order, bytes)) {
    EXPECT_FALSE(bucket.empty());
    joined.insert(joined.end(), bucket.begin(), bucket.end());
  }
  EXPECT_EQ(joined, order);
  EXPECT_TRUE(plan_buckets({}, bytes).empty());
}

}  // namespace
}  // namespace accelmgr::device
