#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "accelmgr/distributed.hpp"
#include "launcher/distributed/ranks.hpp"
#include "message_of.hpp"

namespace accelmgr::distributed {
namespace {

using test::expect_on_ranks;
using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

TEST(BroadcastOf, TensorsIsTheSourcesOnEveryRank) {
  expect_on_ranks(3, [](int rank) {
    for (int src = 0; src < 3; ++src) {
      const auto mine = at::arange(6, at::kFloat).reshape({2, 3}) + rank;
      const auto theirs = at::arange(6, at::kFloat).reshape({2, 3}) + src;
      EXPECT_TRUE(at::equal(broadcast(mine, src), theirs));
      EXPECT_TRUE(at::equal(broadcast(mine.t(), src), theirs.t()));
      EXPECT_TRUE(at::equal(mine, at::arange(6, at::kFloat).reshape({2, 3}) + rank));
      EXPECT_TRUE(at::equal(broadcast(at::zeros({0, 2}), src), at::zeros({0, 2})));
      EXPECT_EQ(broadcast(at::ones({}) * rank, src).item().toDouble(), src);
    }
  });
}

TEST(BroadcastInSafeMode, TheOthersMayPassNothing) {
  expect_on_ranks(3, [](int rank) {
    const bool source = rank == 1;
    const auto sent = at::arange(6, at::kLong).reshape({1, 2, 3});
    EXPECT_TRUE(at::equal(broadcast(source ? sent : at::Tensor(), 1, true), sent));
    EXPECT_TRUE(at::equal(broadcast(source ? sent.permute({2, 0, 1}) : at::Tensor(), 1, true),
                          sent.permute({2, 0, 1})));
  });
}

TEST(BroadcastInSafeMode, TheOthersNeedNotKnowWhatComes) {
  expect_on_ranks(3, [](int rank) {
    const auto send = [rank](Broadcast anything) { return broadcast(rank == 0 ? anything : Broadcast()); };
    EXPECT_TRUE(at::equal(std::get<at::Tensor>(send(at::ones({2, 2}))), at::ones({2, 2})));
    EXPECT_EQ(std::get<double>(send(12.3456)), 12.3456);
    EXPECT_EQ(std::get<std::string>(send(std::string("a\0\xff", 3))), std::string("a\0\xff", 3));
    // Arguments of ranks other than the source are ignored.
    EXPECT_EQ(std::get<double>(broadcast(rank == 0 ? Broadcast(1.5) : Broadcast("text"))), 1.5);
  });
}

TEST(BroadcastInSafeMode, WhatTheSourceCannotSendIsSaidToAll) {
  expect_on_ranks(2, [](int rank) {
    EXPECT_THAT(message_of<UsageError>([] { broadcast(Broadcast(), 0); }),
                AllOf(HasSubstr("passed no value"), HasSubstr("rank 0")));
    EXPECT_THAT(message_of<UsageError>(
                    [&] { broadcast(rank == 0 ? at::ones({2}).to_sparse() : at::Tensor(), 0, true); }),
                AllOf(HasSubstr("Sparse"), HasSubstr("rank 0")));
    EXPECT_EQ(all_reduce(1.0), 2.0);
  });
}

TEST(BroadcastInSafeMode, ATensorWhereANumberIsExpectedIsNamedAndTheRanksAreInTheSameCall) {
  expect_on_ranks(2, [](int rank) {
    if (rank == 0) {
      EXPECT_EQ(broadcast(at::ones({3}), 0, true).numel(), 3);
    } else {
      EXPECT_THAT(test::mismatched([] { broadcast(1.0, 0, true); }), testing::ElementsAre(0));
    }
    EXPECT_EQ(all_reduce(1.0), 2.0);
  });
}

TEST(BroadcastWithoutSafeMode, NothingIsRefused) {
  expect_on_ranks(2, [](int) {
    EXPECT_THAT(message_of<UsageError>([] { broadcast(Broadcast(), 0, false); }), HasSubstr("safe mode"));
    EXPECT_THAT(message_of<UsageError>([] { broadcast(at::Tensor()); }), HasSubstr("undefined"));
    EXPECT_EQ(std::get<double>(broadcast(Broadcast(2.0), 0, false)), 2.0);
  });
}

}  // namespace
}  // namespace accelmgr::distributed
