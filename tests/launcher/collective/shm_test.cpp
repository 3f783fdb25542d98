// Tests of what is particular to shm: the sizes at which it cuts a buffer into more rounds, and signatures
// that need a second cache line. tests/launcher/contract/collective tests what all backends promise.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "launcher/collective/shm/layout.hpp"
#include "worlds.hpp"

namespace accelmgr::collective {
namespace {

using test::run_threads;

constexpr std::size_t half = shm::spinning_half_bytes / sizeof(std::uint32_t);
constexpr std::size_t parking_half = shm::parking_half_bytes / sizeof(std::uint32_t);
// Sizes at and around the memory that a half gets first, and around the size of a half.
const std::size_t counts[] = {0, 1, 4096, half - 1, half + 1, parking_half - 1, parking_half + 1};

using Words = std::vector<std::uint32_t>;

/// Element i of block `block` of rank `rank`.
std::uint32_t word(std::size_t rank, std::size_t block, std::size_t i) {
  return static_cast<std::uint32_t>((rank * 16 + block) << 24 | i);
}

Words block_of(std::size_t rank, std::size_t block, std::size_t count) {
  Words words(count);
  for (std::size_t i = 0; i < count; ++i) words[i] = word(rank, block, i);
  return words;
}

Words concatenated(std::size_t blocks, const std::function<Words(std::size_t)>& block) {
  Words all;
  for (std::size_t i = 0; i < blocks; ++i) {
    const auto next = block(i);
    all.insert(all.end(), next.begin(), next.end());
  }
  return all;
}

class Cuts : public testing::TestWithParam<std::tuple<int, shm::Waiting>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  std::size_t n() const { return static_cast<std::size_t>(size()); }
  void run(const std::function<void(Communicator&)>& body) const {
    run_threads(size(), body, std::get<1>(GetParam()));
  }
};

TEST_P(Cuts, OfAReductionAreNotSeen) {
  run([&](Communicator& world) {
    const auto me = static_cast<std::size_t>(world.rank());
    for (const auto count : counts) {
      Words sum(count);
      for (std::size_t rank = 0; rank < n(); ++rank)
        for (std::size_t i = 0; i < count; ++i) sum[i] += word(rank, rank, i);
      const auto in = block_of(me, me, count);
      Words out(count);
      world.all_reduce(in.data(), out.data(), count, DType::uint32, ReduceOp::sum);
      EXPECT_TRUE(out == sum) << count;
      out = in;
      world.all_reduce(out.data(), out.data(), count, DType::uint32, ReduceOp::sum);
      EXPECT_TRUE(out == sum) << count << " in place";
      const auto blocks = concatenated(n(), [&](std::size_t block) { return block_of(me, block, count); });
      world.reduce_scatter(blocks.data(), out.data(), count, DType::uint32, ReduceOp::max);
      EXPECT_TRUE(out == block_of(n() - 1, me, count)) << count;
      auto both = blocks;
      world.reduce_scatter(both.data(), both.data(), count, DType::uint32, ReduceOp::max);
      both.resize(count);
      EXPECT_TRUE(both == out) << count << " in place";
    }
  });
}

TEST_P(Cuts, OfACopyAreNotSeen) {
  run([&](Communicator& world) {
    const auto me = static_cast<std::size_t>(world.rank());
    for (const auto count : counts) {
      const auto in = concatenated(n(), [&](std::size_t block) { return block_of(me, block, count); });
      const auto exchanged = concatenated(n(), [&](std::size_t from) { return block_of(from, me, count); });
      const auto gathered = concatenated(n(), [&](std::size_t from) { return block_of(from, 0, count); });
      Words out(in.size());
      world.all_to_all(in.data(), out.data(), count, DType::uint32);
      EXPECT_TRUE(out == exchanged) << count;
      out = in;
      world.all_to_all(out.data(), out.data(), count, DType::uint32);
      EXPECT_TRUE(out == exchanged) << count << " in place";
      world.all_gather(in.data(), out.data(), count, DType::uint32);
      EXPECT_TRUE(out == gathered) << count;
      out = in;
      world.all_gather(out.data(), out.data(), count, DType::uint32);
      EXPECT_TRUE(out == gathered) << count << " in place";
      auto data = block_of(me, 0, count);
      world.broadcast(data.data(), count, DType::uint32, world.size() - 1);
      EXPECT_TRUE(data == block_of(n() - 1, 0, count)) << count;
    }
  });
}

TEST_P(Cuts, OfObjectsAreNotSeen) {
  const int size = this->size();
  run([&](Communicator& world) {
    for (const std::size_t length : {std::size_t{0}, std::size_t{1}, 2 * shm::spinning_half_bytes + 1,
                                     2 * shm::parking_half_bytes + 1}) {
      const auto object = [&](int rank) {
        return std::string(length / static_cast<std::size_t>(rank + 1), static_cast<char>('a' + rank));
      };
      const auto all = world.all_gather_objects(object(world.rank()));
      for (int rank = 0; rank < size; ++rank)
        EXPECT_TRUE(all[static_cast<std::size_t>(rank)] == object(rank)) << length;
      EXPECT_TRUE(world.broadcast_object(object(world.rank()), size - 1) == object(size - 1)) << length;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shm, Cuts,
                         testing::Combine(testing::Values(1, 2, 3),
                                          testing::Values(shm::Waiting::by_cores, shm::Waiting::parked)),
                         [](const auto& info) {
                           const bool parked = std::get<1>(info.param) == shm::Waiting::parked;
                           return std::to_string(std::get<0>(info.param)) + (parked ? "Parked" : "ByCores");
                         });

TEST(Shm, ComparesDimensionsBeyondTheFirstLineOfAPost) {
  run_threads(2, [](Communicator& world) {
    for (int dimensions : {1, 4, 5, 16}) {
      std::vector<std::int64_t> shape(static_cast<std::size_t>(dimensions), 1);
      float value = 1, out = 7;
      const auto reduce = [&] {
        world.all_reduce(&value, &out, 1, DType::float32, ReduceOp::sum, {.shape = shape, .timeout_s = 0});
      };
      reduce();
      EXPECT_EQ(out, 2);
      shape.back() = 1 + world.rank();
      try {
        out = 7;
        reduce();
        ADD_FAILURE() << "no error with " << dimensions << " dimensions";
      } catch (const CollectiveError& error) {
        EXPECT_EQ(error.cause(), CollectiveError::Cause::mismatch) << error.what();
        EXPECT_EQ(error.ranks(), std::vector<int>{1});
        EXPECT_EQ(out, 7);
      }
    }
    world.barrier();
  });
}

}  // namespace
}  // namespace accelmgr::collective
