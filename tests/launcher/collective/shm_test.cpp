// Tests of what is particular to shm: the sizes at which it cuts a buffer into more rounds, and signatures
// that need a second cache line. tests/launcher/contract/collective tests what all backends promise.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "expect_error.hpp"
#include "launcher/collective/shm/layout.hpp"
#include "launcher/contract/collective/call.hpp"
#include "worlds.hpp"

namespace accelmgr::collective {
namespace {

using accelmgr::test::expect_error;
using test::run_threads;

constexpr std::size_t half = shm::spinning_half_bytes / sizeof(std::uint32_t);
constexpr std::size_t parking_half = shm::parking_half_bytes / sizeof(std::uint32_t);
// Sizes at and around the memory that a half gets first, and around the size of a half.
const std::size_t counts[] = {0, 1, 4096, half - 1, half + 1, parking_half - 1, parking_half + 1};

class Cuts : public testing::TestWithParam<std::tuple<int, shm::Waiting>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  void run(const std::function<void(Communicator&)>& body) const {
    run_threads(size(), body, std::get<1>(GetParam()));
  }
};

TEST_P(Cuts, OfElementsAreNotSeen) {
  run([&](Communicator& world) {
    for (const auto kind : {CallKind::all_reduce, CallKind::reduce_scatter, CallKind::all_gather,
                            CallKind::all_to_all, CallKind::broadcast})
      for (const auto count : counts)
        for (const bool in_place : {false, true})
          EXPECT_EQ(contract::perform({.kind = kind,
                                       .dtype = DType::uint32,
                                       .count = count,
                                       .root = world.size() - 1,
                                       .in_place = in_place},
                                      world),
                    "");
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
      SCOPED_TRACE(dimensions);
      out = 7;
      expect_error(CollectiveError::Cause::mismatch, {1}, reduce);
      EXPECT_EQ(out, 7);
    }
    world.barrier();
  });
}

}  // namespace
}  // namespace accelmgr::collective
