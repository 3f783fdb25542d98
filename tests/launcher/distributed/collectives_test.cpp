#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "accelmgr/distributed_context.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace accelmgr::distributed {
namespace {

using test::expect_on_ranks;
using test::message_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class Collectives : public testing::TestWithParam<int> {
 protected:
  static int size() { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, testing::Values(1, 2, 3), testing::PrintToStringParamName());

TEST_P(Collectives, OurLauncherIsAContext) {
  expect_on_ranks(size(), [](int rank) {
    test::expect_place(rank, size());
    EXPECT_EQ(model_name(), "accelmgr-dist");
    EXPECT_EQ(backend(), "shm");
    EXPECT_EQ(device_name(), "cpu");
  });
  EXPECT_EQ(model_name(), "serial");
}

TEST_P(Collectives, AllReduceOfNumbers) {
  expect_on_ranks(size(), [](int rank) {
    const double n = size();
    EXPECT_EQ(all_reduce(rank + 1), n * (n + 1) / 2);
    EXPECT_EQ(all_reduce(rank + 1.5, "MIN"), 1.5);
    EXPECT_EQ(all_reduce(rank + 1.5, "MAX"), n + 0.5);
    EXPECT_EQ(all_reduce(2, "PRODUCT"), std::pow(2, n));
    EXPECT_EQ(all_reduce(rank, "AVG"), (n - 1) / 2);
  });
}

TEST_P(Collectives, AllGatherOfTextsAndObjects) {
  expect_on_ranks(size(), [](int rank) {
    const auto texts =
        all_gather(std::string(static_cast<std::size_t>(rank) * 10'000, 'x') + std::to_string(rank));
    ASSERT_EQ(static_cast<int>(texts.size()), size());
    for (int other = 0; other < size(); ++other) {
      EXPECT_EQ(texts[static_cast<std::size_t>(other)].size(), static_cast<std::size_t>(other) * 10'000 + 1);
      EXPECT_EQ(texts[static_cast<std::size_t>(other)].back(), '0' + other);
    }
    const Value object{{"rank", rank}, {"bytes", Value::binary({0, 255})}, {"list", {1, 2.5, nullptr, "é"}}};
    const auto objects = all_gather_object(object);
    ASSERT_EQ(static_cast<int>(objects.size()), size());
    for (int other = 0; other < size(); ++other) {
      auto expected = object;
      expected["rank"] = other;
      EXPECT_EQ(objects[static_cast<std::size_t>(other)], expected);
    }
  });
}

TEST(Collective, TextsAndObjectsAreNotTakenForEachOther) {
  expect_on_ranks(2, [](int rank) {
    const auto gather = [rank] {
      if (rank == 0)
        all_gather("text");
      else
        all_gather_object("text");
    };
    EXPECT_THAT(message_of<CollectiveError>(gather), AllOf(HasSubstr("a string"), HasSubstr("an object")));
  });
}

TEST(Collective, ARankThatHasEndedIsNamedAndTheRestGoesOn) {
  expect_on_ranks(3, [](int rank) {
    barrier();
    if (rank == 1) return;
    EXPECT_THAT(message_of<CollectiveError>([] { all_reduce(1.0); }), HasSubstr("rank 1"));
    const auto rest = new_group({0, 2});
    EXPECT_EQ(all_reduce(1.0, "SUM", rest), 2.0);
  });
}

}  // namespace
}  // namespace accelmgr::distributed
