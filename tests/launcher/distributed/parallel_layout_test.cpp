#include "launcher/distributed/multiprocess/parallel_layout.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"

namespace accelmgr::distributed {
namespace {

using test::message_of;
using testing::ElementsAre;
using testing::HasSubstr;
using Groups = std::vector<std::vector<int>>;

/// Expects that every rank is in one group, that all groups have the same size, and that each is ascending.
void expect_partition(const Groups& groups, int world_size, int group_size) {
  std::vector<int> all;
  for (const auto& group : groups) {
    EXPECT_EQ(static_cast<int>(group.size()), group_size);
    EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
    all.insert(all.end(), group.begin(), group.end());
  }
  std::sort(all.begin(), all.end());
  ASSERT_EQ(static_cast<int>(all.size()), world_size);
  for (int rank = 0; rank < world_size; ++rank) EXPECT_EQ(all[static_cast<std::size_t>(rank)], rank);
}

const std::vector<int>& group_of(const Groups& groups, int rank) {
  return *std::find_if(groups.begin(), groups.end(),
                       [rank](const auto& group) { return std::ranges::find(group, rank) != group.end(); });
}

TEST(ParallelLayout, EveryRankIsInOneGroupOfEachKindAndTheyMeetInItAlone) {
  for (int world = 1; world <= 24; ++world)
    for (int model = 1; model <= world; ++model)
      for (int pipeline = 1; model * pipeline <= world; ++pipeline) {
        if (world % (model * pipeline) != 0) continue;
        const auto layout = parallel_layout(world, model, pipeline);
        expect_partition(layout.model, world, model);
        expect_partition(layout.pipeline, world, pipeline);
        expect_partition(layout.data, world, world / (model * pipeline));
        for (int rank = 0; rank < world; ++rank) {
          std::vector<int> others;
          for (const auto* groups : {&layout.model, &layout.pipeline, &layout.data})
            for (const int member : group_of(*groups, rank))
              if (member != rank) others.push_back(member);
          std::ranges::sort(others);
          EXPECT_EQ(std::ranges::adjacent_find(others), others.end());
        }
      }
}

TEST(ParallelLayout, ModelShardsAreNeighboursAndStagesFarApart) {
  const auto layout = parallel_layout(8, 2, 2);
  EXPECT_THAT(layout.model,
              ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3), ElementsAre(4, 5), ElementsAre(6, 7)));
  EXPECT_THAT(layout.pipeline,
              ElementsAre(ElementsAre(0, 4), ElementsAre(1, 5), ElementsAre(2, 6), ElementsAre(3, 7)));
  EXPECT_THAT(layout.data,
              ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3), ElementsAre(4, 6), ElementsAre(5, 7)));
}

TEST(ParallelLayout, DegreesThatDoNotDivideTheWorldAreNamed) {
  EXPECT_THROW(parallel_layout(8, 3, 1), ConfigError);
  EXPECT_THAT(
      message_of<ConfigError>([] { parallel_layout(4, 2, 4); }),
      HasSubstr("model_parallelism 2 times pipeline_parallelism 4 is 8, which does not divide the 4 ranks"));
  EXPECT_THAT(message_of<ConfigError>([] { parallel_layout(4, 0, 1); }), HasSubstr("model_parallelism is 0"));
  EXPECT_THAT(message_of<ConfigError>([] { parallel_layout(4, 1, -1); }),
              HasSubstr("pipeline_parallelism is -1"));
  // The product of the degrees does not fit into an int.
  EXPECT_THAT(message_of<ConfigError>([] { parallel_layout(4, 65536, 65536); }), HasSubstr("4294967296"));
}

}  // namespace
}  // namespace accelmgr::distributed
