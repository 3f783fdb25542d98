// Tests of the plan of shards: what a team holds, every byte exactly once.
#include "engine/session/shards.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "session_support.hpp"

namespace accelmgr::session {
namespace {

/// Random tensors of all groups and many dtypes, some of them larger than a bucket.
Manifest random_manifest(std::mt19937_64& random) {
  constexpr DType dtypes[]{DType::float32, DType::bfloat16,  DType::float16,
                           DType::float64, DType::complex64, DType::int8};
  Manifest manifest;
  const auto kinds = 1 + random() % std::size(dtypes);
  for (std::uint64_t tensors = 1 + random() % 12; tensors > 0; --tensors) {
    const auto count = random() % 8 == 0 ? 8'000'000 + random() % 100 : 1 + random() % 400'000;
    const auto dtype = dtypes[random() % kinds];
    manifest.tensors.push_back(
        tensor_of(count, dtype, element_of(dtype) ? static_cast<Group>(random() % 3) : Group::frozen));
  }
  manifest.set_precision({.bf16_runners = random() % 3 == 0,
                          .bf16_slabs = random() % 2 == 0,
                          .float32_gradients = random() % 2 == 0});
  manifest.place_tensors();
  return manifest;
}

void expect_shards_of_whole_cache_lines(const ShardPlan& plan, const Bytes& bucket, int size) {
  const auto each = plan.shard_bytes(bucket, size);
  EXPECT_EQ(bucket.first % 64, 0u);
  EXPECT_EQ(each % 64, 0u);
  EXPECT_GE(each * std::uint64_t(size), bucket.count());
  auto at = bucket.first;
  for (int position = 0; position < size; ++position) {
    const auto shard = plan.shard(bucket, position, size);
    EXPECT_EQ(shard.first, at);
    at = shard.end;
  }
  EXPECT_EQ(at, bucket.end);
}

TEST(ShardPlan, HasEveryByteOnceAndOneDtypeInABucketAndCutsItIntoShardsOfWholeCacheLines) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    const auto manifest = random_manifest(random);
    for (const auto of : {ShardPlan::Of::gradients, ShardPlan::Of::parameters}) {
      const ShardPlan plan(manifest, of);
      std::vector<int> seen(manifest.tensors.size());
      for (std::size_t b = 0; b < plan.buckets().size(); ++b) {
        const auto& first = manifest.tensors[plan.tensors(b).front()];
        const bool stands_alone = of == ShardPlan::Of::gradients && first.group == Group::frozen;
        EXPECT_TRUE(plan.tensors(b).size() == 1 || !stands_alone) << seed;
        for (const auto i : plan.tensors(b)) {
          const auto& tensor = manifest.tensors[i];
          ++seen[i];
          EXPECT_GE(plan.place(i), plan.buckets()[b].first);
          EXPECT_LE(plan.place(i) + tensor.count * size_of(tensor.runner_dtype), plan.buckets()[b].end);
          EXPECT_EQ(tensor.runner_dtype, first.runner_dtype) << seed;
          EXPECT_EQ(tensor.group, first.group) << seed;
        }
        expect_shards_of_whole_cache_lines(plan, plan.buckets()[b], 1 + int(random() % max_ranks));
      }
      for (std::size_t i = 0; i < seen.size(); ++i)
        EXPECT_EQ(seen[i], of == ShardPlan::Of::parameters || manifest.tensors[i].has_room()) << seed;
      std::vector<Bytes> sorted(plan.buckets().begin(), plan.buckets().end());
      std::ranges::sort(sorted, {}, &Bytes::first);
      for (std::size_t b = 1; b < sorted.size(); ++b) EXPECT_GE(sorted[b].first, sorted[b - 1].end) << seed;
      if (!sorted.empty()) {
        EXPECT_LE(sorted.back().end, plan.bytes());
      }
    }
  }
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
    manifest.tensors.push_back(tensor_of(count, DType::float32, group));
  manifest.place_tensors();
  const ShardPlan plan(manifest);
  ASSERT_EQ(plan.buckets().size(), 3u);
  const auto listed = [&](std::size_t bucket) {
    return std::vector(plan.tensors(bucket).begin(), plan.tensors(bucket).end());
  };
  EXPECT_EQ(listed(0), (std::vector<std::size_t>{3}));
  EXPECT_EQ(listed(1), (std::vector<std::size_t>{0, 2}));
  EXPECT_EQ(listed(2), (std::vector<std::size_t>{1, 4}));
}

// As runners have them: a float32 parameter of runners in bfloat16 lies among those that are bfloat16.
TEST(ShardPlan, PlacesParametersWithTheDtypesOfRunners) {
  Manifest manifest;
  for (const auto dtype : {DType::float32, DType::bfloat16, DType::float64})
    manifest.tensors.push_back(tensor_of(100, dtype));
  manifest.set_precision({.bf16_runners = true});
  manifest.place_tensors();
  const ShardPlan plan(manifest);
  EXPECT_EQ(plan.place(0), 0u);
  EXPECT_EQ(plan.place(1), 256u);
  EXPECT_EQ(plan.place(2), 512u);
  EXPECT_EQ(plan.bytes(), 512u + 104 * 8);
  EXPECT_EQ(plan.buckets()[0], (Bytes{0, 512}));
}

}  // namespace
}  // namespace accelmgr::session
