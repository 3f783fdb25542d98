#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelmgr/distributed_context.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace accelmgr::distributed {
namespace {

using test::expect_on_ranks;
using test::message_of;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(Groups, OfNumbersTextsAndObjects) {
  expect_on_ranks(3, [](int rank) {
    const std::vector<int> list{2, 0};
    const auto group = new_group(list);
    EXPECT_THAT(group.ranks(), ElementsAre(0, 2));
    EXPECT_EQ(group.rank(), rank == 1 ? -1 : rank / 2);
    EXPECT_EQ(group.size(), 2);
    EXPECT_EQ(group.contains(rank), rank != 1);
    const bool outside = rank == 1;
    for (const GroupArgument& argument : {GroupArgument(group), GroupArgument(list)}) {
      EXPECT_EQ(all_reduce(7.0, "SUM", argument), outside ? 7.0 : 14.0);
      const auto texts = all_gather(std::to_string(rank), argument);
      const auto objects = all_gather_object(rank, argument);
      EXPECT_EQ(texts, outside ? std::vector<std::string>({"1"}) : std::vector<std::string>({"0", "2"}));
      EXPECT_EQ(objects, (outside ? std::vector<Value>{1} : std::vector<Value>{0, 2}));
    }
  });
}

TEST(Groups, BackendsThatCannotServeThemAreRefused) {
  expect_on_ranks(2, [](int) {
    EXPECT_EQ(new_group({0, 1}, "shm").size(), 2);
    const std::vector<int> both{0, 1}, beyond{0, 2};
    EXPECT_EQ(test::config_key_of([&] { new_group(both, "mpi"); }), "launch.backend");
    EXPECT_THROW(new_group(beyond), ConfigError);
    EXPECT_THAT(message_of<ConfigError>([] { barrier(), all_reduce(1.0, "SUM", std::vector<int>{}); }),
                HasSubstr("one rank"));
  });
}

}  // namespace
}  // namespace accelmgr::distributed
