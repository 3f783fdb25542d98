#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelmgr/distributed_context.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace accelmgr::distributed {
namespace {

using test::expect_on_ranks;
using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

TEST(BroadcastOf, NumbersAndTextsIsTheSourcesOnEveryRank) {
  expect_on_ranks(3, [](int rank) {
    for (const bool safe_mode : {false, true})
      for (int src = 0; src < 3; ++src) {
        EXPECT_EQ(broadcast(rank + 0.25, src, safe_mode), src + 0.25);
        EXPECT_EQ(broadcast(std::string(static_cast<std::size_t>(rank), 'x'), src, safe_mode),
                  std::string(static_cast<std::size_t>(src), 'x'));
      }
    EXPECT_THAT(message_of<UsageError>([] { broadcast(1.0, 3); }),
                AllOf(HasSubstr("no rank 3"), HasSubstr("of 3")));
  });
}

TEST(BroadcastInSafeMode, AnotherKindThanExpectedIsNamed) {
  expect_on_ranks(2, [](int rank) {
    if (rank == 0) {
      EXPECT_EQ(broadcast("text", 0, true), "text");
    } else {
      EXPECT_THAT(test::mismatched([] { broadcast(1.0, 0, true); }), testing::ElementsAre(0));
    }
  });
}

}  // namespace
}  // namespace accelmgr::distributed
