// Tests of the plan of shards: what a team holds, every element exactly once.
#include "session/shards.hpp"

#include <gtest/gtest.h>

#include <random>

namespace accelmgr::session {
namespace {

/// Random tensors of all groups, some of them larger than a bucket.
Manifest random_manifest(std::mt19937_64& random, Element element) {
  Manifest manifest;
  for (std::uint64_t tensors = 1 + random() % 12; tensors > 0; --tensors) {
    const auto count = random() % 8 == 0 ? 8'000'000 + random() % 100 : 1 + random() % 400'000;
    manifest.tensors.push_back({.name = "w" + std::to_string(tensors),
                                .aliases = {},
                                .shape = {static_cast<std::int64_t>(count)},
                                .count = count,
                                .group = static_cast<Group>(random() % 3)});
  }
  manifest.place_tensors(element);
  return manifest;
}

TEST(ShardPlan, HasEveryElementOnceAndNothingThatIsFrozen) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    std::mt19937_64 random(seed);
    const auto element = seed % 2 == 0 ? Element::f32 : Element::f64;
    const auto manifest = random_manifest(random, element);
    for (const auto of : {ShardPlan::Of::gradients, ShardPlan::Of::parameters}) {
      const ShardPlan plan(manifest, element, of);
      std::vector<int> seen(manifest.tensors.size());
      for (std::size_t b = 0; b < plan.buckets().size(); ++b)
        for (const auto i : plan.tensors(b)) {
          ++seen[i];
          EXPECT_GE(manifest.tensors[i].first, plan.buckets()[b].first);
          EXPECT_LE(manifest.tensors[i].first + manifest.tensors[i].count, plan.buckets()[b].end);
        }
      for (std::size_t i = 0; i < seen.size(); ++i)
        EXPECT_EQ(seen[i], of == ShardPlan::Of::parameters || manifest.tensors[i].group != Group::frozen)
            << seed;
    }
  }
}

TEST(ShardPlan, CutsEachBucketIntoShardsOfWholeCacheLines) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    std::mt19937_64 random(seed);
    const auto manifest = random_manifest(random, Element::f32);
    const ShardPlan plan(manifest, Element::f32);
    const int size = 1 + int(random() % max_ranks);
    for (const auto& bucket : plan.buckets()) {
      const auto each = plan.shard_elements(bucket, size);
      EXPECT_EQ(bucket.first % 16, 0u);
      EXPECT_EQ(each % 16, 0u);
      EXPECT_GE(each * std::uint64_t(size), bucket.count());
      auto at = bucket.first;
      for (int position = 0; position < size; ++position) {
        const auto shard = plan.shard(bucket, position, size);
        EXPECT_EQ(shard.first, at);
        at = shard.end;
        if (shard.count() == 0) continue;
        for (const auto element : {shard.first, shard.end - 1}) {
          EXPECT_EQ(plan.holder_of(element, size).position, position);
          EXPECT_EQ(plan.holder_of(element, size).end, shard.end);
        }
      }
      EXPECT_EQ(at, bucket.end);
    }
  }
}

TEST(ShardPlan, NobodyHoldsWhatIsInNoBucket) {
  Manifest manifest;
  for (const auto group : {Group::frozen, Group::decay, Group::frozen})
    manifest.tensors.push_back({.name = "w", .aliases = {}, .shape = {100}, .count = 100, .group = group});
  manifest.place_tensors(Element::f32);
  const ShardPlan plan(manifest, Element::f32);
  EXPECT_EQ(plan.holder_of(111, 2).position, 1);
  EXPECT_EQ(plan.holder_of(112, 2).position, -1);
  EXPECT_EQ(plan.holder_of(300, 2).position, -1);
}

// Backward comes to the last parameters first. Biases and norms complete all through backward, so their
// bucket is the last one.
TEST(ShardPlan, TravelsInTheOrderOfBackward) {
  Manifest manifest;
  for (const auto& [count, group] : {std::pair{300'000u, Group::decay},
                                     {5u, Group::no_decay},
                                     {200'000u, Group::decay},
                                     {300'000u, Group::decay},
                                     {6u, Group::no_decay}})
    manifest.tensors.push_back(
        {.name = "w", .aliases = {}, .shape = {count}, .count = count, .group = group});
  manifest.place_tensors(Element::f32);
  const ShardPlan plan(manifest, Element::f32);
  ASSERT_EQ(plan.buckets().size(), 3u);
  const auto listed = [&](std::size_t bucket) {
    return std::vector(plan.tensors(bucket).begin(), plan.tensors(bucket).end());
  };
  EXPECT_EQ(listed(0), (std::vector<std::size_t>{3}));
  EXPECT_EQ(listed(1), (std::vector<std::size_t>{0, 2}));
  EXPECT_EQ(listed(2), (std::vector<std::size_t>{1, 4}));
}

}  // namespace
}  // namespace accelmgr::session
