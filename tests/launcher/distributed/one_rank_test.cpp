#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include "accelmgr/distributed_context.hpp"
#include "launcher/collective/worlds.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace accelmgr::distributed {
namespace {

using test::expect_on_ranks;
using test::message_of;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;

TEST(OneRankOnly, CallsItOnThatRank) {
  expect_on_ranks(3, [](int rank) {
    const auto twice = one_rank_only([](int number) { return 2 * number; }, 1);
    EXPECT_EQ(twice(4), rank == 1 ? std::optional(8) : std::nullopt);
    bool called = false;
    one_rank_only([&called] { called = true; })();
    EXPECT_EQ(called, rank == 0);
  });
}

using Shared = collective::test::Shared<std::atomic<int>>;

constexpr int rounds = 30;

TEST(OneRankOnly, WithABarrierTheOthersWaitForIt) {
  const Shared done;
  expect_on_ranks(3, [&](int) {
    for (int round = 1; round <= rounds; ++round) {
      one_rank_only([&] { *done = round; }, 2, /*with_barrier=*/true)();
      EXPECT_EQ(*done, round);
      barrier();
    }
  });
}

TEST(OneRankFirst, TheOthersComeAfterIt) {
  const Shared done;
  expect_on_ranks(3, [&](int rank) {
    for (int round = 1; round <= rounds; ++round) {
      const int first = round % 3;
      {
        const auto turn = one_rank_first(first, /*local=*/round % 2 == 0);
        if (rank == first) *done = round;
        EXPECT_EQ(*done, round);
      }
      barrier();
    }
  });
}

TEST(OneRankFirst, AnExceptionInsideLetsTheOthersGoOn) {
  expect_on_ranks(3, [](int rank) {
    const auto run = [rank] {
      const auto turn = one_rank_first(1);
      if (rank == 1) throw std::runtime_error("no data");
    };
    if (rank == 1)
      EXPECT_EQ(message_of<std::runtime_error>(run), "no data");
    else
      run();
    EXPECT_EQ(all_reduce(1.0), 3.0);
  });
}

TEST(OneRankFirst, AnExceptionInsideIsNotHiddenByOthersThatAreLost) {
  expect_on_ranks(2, [](int rank) {
    barrier();
    if (rank == 0) return;
    const auto lines = test::log_lines_of([] {
      EXPECT_EQ(message_of<std::runtime_error>([] {
                  const auto turn = one_rank_first(1);
                  throw std::runtime_error("no data");
                }),
                "no data");
    });
    EXPECT_THAT(lines, Contains(AllOf(HasSubstr("one_rank_first: the other ranks could not be released: "),
                                      HasSubstr("rank 0"))));
  });
}

TEST(OneRankFirst, ARankOutOfRangeIsNamedWithTheRange) {
  expect_on_ranks(2, [](int) {
    EXPECT_EQ(message_of<ConfigError>([] { const auto turn = one_rank_first(2); }),
              "rank should be between 0 and 1, but given 2");
    EXPECT_THROW(static_cast<void>(one_rank_first(-1, /*local=*/true)), ConfigError);
  });
}

}  // namespace
}  // namespace accelmgr::distributed
