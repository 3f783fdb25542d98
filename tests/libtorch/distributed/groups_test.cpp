#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>

#include "accelmgr/distributed.hpp"
#include "launcher/distributed/ranks.hpp"

namespace accelmgr::distributed {
namespace {

using test::expect_on_ranks;
using testing::ElementsAre;

TEST(Groups, ReduceAmongTheirMembersAndOthersGetTheirInputBack) {
  expect_on_ranks(3, [](int rank) {
    const auto tensor = at::full({2}, rank + 1.0);
    const std::vector<int> list{2, 0};
    const auto group = new_group(list);
    EXPECT_THAT(group.ranks(), ElementsAre(0, 2));
    EXPECT_EQ(group.rank(), rank == 1 ? -1 : rank / 2);
    EXPECT_EQ(group.size(), 2);
    EXPECT_EQ(group.contains(rank), rank != 1);
    for (const GroupArgument& argument : {GroupArgument(group), GroupArgument(list)}) {
      const auto sum = all_reduce(tensor, "SUM", argument);
      if (rank == 1) {
        EXPECT_TRUE(sum.is_same(tensor));
        EXPECT_TRUE(all_gather(tensor, argument).is_same(tensor));
        EXPECT_TRUE(reduce_scatter(tensor, "SUM", argument).is_same(tensor));
        EXPECT_TRUE(all_to_all(tensor, argument).is_same(tensor));
        EXPECT_EQ(all_reduce(7.0, "SUM", argument), 7.0);
        EXPECT_EQ(all_gather(7.0, argument).numel(), 1);
        EXPECT_THAT(all_gather("x", argument), ElementsAre("x"));
        EXPECT_THAT(all_gather_object(1, argument), ElementsAre(1));
      } else {
        EXPECT_TRUE(at::equal(sum, at::full({2}, 4.0)));
        EXPECT_EQ(all_gather(tensor, argument).numel(), 4);
        EXPECT_TRUE(at::equal(reduce_scatter(tensor, "SUM", argument), at::full({1}, 4.0)));
        EXPECT_EQ(all_to_all(tensor, argument)[rank == 0 ? 1 : 0].item().toDouble(), rank == 0 ? 3 : 1);
        EXPECT_EQ(all_reduce(7.0, "SUM", argument), 14.0);
        EXPECT_EQ(all_gather(7.0, argument).numel(), 2);
        EXPECT_THAT(all_gather(std::to_string(rank), argument), ElementsAre("0", "2"));
        EXPECT_THAT(all_gather_object(rank, argument), ElementsAre(0, 2));
      }
    }
  });
}

TEST(Groups, OfMembersThatDifferAreNamed) {
  expect_on_ranks(3, [](int rank) {
    if (rank == 2) return barrier();
    const auto group = new_group({0, 1});
    EXPECT_THAT(test::mismatched([&] { all_reduce(at::full({rank + 2}, 1.0), "SUM", group); }),
                ElementsAre(1));
    barrier();
  });
}

}  // namespace
}  // namespace accelmgr::distributed
