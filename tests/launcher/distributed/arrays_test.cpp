// Tests of collectives of arrays, and of those that work on blocks. The contract of communicators has every
// dtype with every reduction.
#include "launcher/distributed/collectives/arrays.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/distributed/arrays/device_group.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace accelmgr::distributed {
namespace {

using test::expect_on_ranks;
using test::message_of;
using testing::ElementsAre;
using testing::HasSubstr;

using Shape = std::vector<std::int64_t>;

Array array_of(const std::vector<float>& values, const Shape& shape) {
  return {values.data(), DType::float32, shape};
}

TEST(Arrays, AreReducedGatheredAndExchanged) {
  expect_on_ranks(3, [](int rank) {
    const auto members = members_of({});
    const auto r = static_cast<float>(rank);
    const std::vector<float> in{r, r + 10, r + 20};
    const Shape shape{3}, of_0_d;
    std::vector<float> out(9);
    all_reduce(members, array_of(in, shape), out.data(), ReduceOp::sum);
    EXPECT_THAT(std::vector(out.begin(), out.begin() + 3), ElementsAre(3, 33, 63));
    all_reduce(members, array_of({r}, of_0_d), out.data(), ReduceOp::max);
    EXPECT_EQ(out[0], 2);
    all_gather(members, array_of(in, shape), out.data());
    EXPECT_THAT(out, ElementsAre(0, 10, 20, 1, 11, 21, 2, 12, 22));
    reduce_scatter(members, array_of(in, shape), out.data(), ReduceOp::sum);
    EXPECT_EQ(out[0], 3 + 30 * r);
    all_to_all(members, array_of(in, shape), out.data());
    EXPECT_THAT(std::vector(out.begin(), out.begin() + 3), ElementsAre(10 * r, 10 * r + 1, 10 * r + 2));
    broadcast(members, array_of(out, shape), out.data(), 2);
    EXPECT_THAT(std::vector(out.begin(), out.begin() + 3), ElementsAre(20, 21, 22));
    const Shape empty{0, 3};
    EXPECT_NO_THROW(all_reduce(members, {nullptr, DType::float32, empty}, nullptr, ReduceOp::sum));
  });
}

TEST(Arrays, HaveTheDTypesThatCollectivesMakeSenseOf) {
  EXPECT_EQ(collective_dtype("bfloat16"), DType::bfloat16);
  EXPECT_EQ(collective_dtype("bool"), DType::boolean);
  for (const auto* name : {"float8_e4m3fn", "complex32", "qint8", ""})
    EXPECT_EQ(message_of<UsageError>([&] { collective_dtype(name); }),
              fmt::format("tensors of dtype {} are not supported in collectives", name));
}

TEST(Arrays, WhoseBlocksDoNotComeOutEvenAreRefusedOnEveryRank) {
  expect_on_ranks(2, [](int) {
    const auto members = members_of({});
    const std::vector<float> in(6);
    const Shape uneven{3, 2}, of_0_d;
    std::vector<float> out(6);
    EXPECT_EQ(message_of<UsageError>([&] { all_to_all(members, array_of(in, uneven), out.data()); }),
              "all_to_all: dimension 0 has 3 elements, which is not a multiple of the 2 ranks");
    EXPECT_THAT(message_of<UsageError>(
                    [&] { reduce_scatter(members, array_of(in, of_0_d), out.data(), ReduceOp::sum); }),
                HasSubstr("reduce_scatter: a 0-d tensor cannot be split"));
    EXPECT_EQ(all_reduce(1.0), 2.0);
  });
}

TEST(Arrays, InSafeModeComeWithTheirShape) {
  expect_on_ranks(2, [](int rank) {
    const auto members = everyone(0);
    const std::vector<float> sent{1, 2, 3, 4, 5, 6};
    const Shape shape{3, 2};
    std::vector<float> got;
    const auto make = [&](DType dtype, const Shape& of) {
      EXPECT_EQ(dtype, DType::float32);
      EXPECT_EQ(of, shape);
      got.resize(6);
      return got.data();
    };
    const auto came = broadcast_safely(members, rank == 0 ? Sent(array_of(sent, shape)) : Sent(), make, 0);
    EXPECT_TRUE(std::holds_alternative<ArrayCame>(came));
    EXPECT_EQ(got, rank == 0 ? std::vector<float>() : sent);
    EXPECT_THAT(message_of<CollectiveError>([&] { refuse_kind(came, 0, "a number"); }),
                HasSubstr("rank 0 sent a tensor, a number was expected"));
    EXPECT_THAT(
        message_of<UsageError>([&] { broadcast_safely(members, Unsendable{"it is sparse"}, make, 0); }),
        HasSubstr("it is sparse (rank 0)"));
  });
}

/// The ranks of our launcher have the backend shm; without it, CUDA is not there to be loaded.
TEST(Arrays, OnDevicesGoThroughHostMemoryWithoutNccl) {
  const auto check = [](int) {
    const auto members = members_of({});
    const Shape shape{3};
    const std::vector<float> in(3);
    const OnDevice place;
    EXPECT_FALSE(members.device_group().all_reduce(array_of(in, shape), nullptr, ReduceOp::sum, place));
    EXPECT_FALSE(members.device_group().all_gather(array_of(in, shape), nullptr, place));
    EXPECT_FALSE(members.device_group().broadcast(array_of(in, shape), nullptr, 1, place));
    const auto group = members_of(new_group({0, 1}));
    EXPECT_FALSE(group.device_group().all_to_all(array_of(in, Shape{2}), nullptr, place));
    const auto listed = members_of(std::vector{0, 1});
    EXPECT_FALSE(listed.device_group().reduce_scatter(array_of(in, Shape{2}), nullptr, ReduceOp::sum, place));
  };
  expect_on_ranks(2, check);
  expect_on_ranks(2, check, {{"ACCELMGR_LAUNCH_BACKEND", "auto"}, {"CUDA_HOME", "/nonexistent"}});
}

}  // namespace
}  // namespace accelmgr::distributed
