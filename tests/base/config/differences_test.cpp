// Tests of differences(): what a run reports when it resumes from a checkpoint of another configuration.
#include "base/config/differences.hpp"

#include "base/config/support.hpp"

namespace accelmgr::config {
namespace {

using Differences = std::vector<std::string>;

Differences between(const Sets& before, const Sets& after) {
  return differences(load_config("", before, {}).config, load_config("", after, {}).config);
}

TEST(Differences, AreTheOptionsOfWhatIsComputedWithBothValues) {
  EXPECT_EQ(between({"seed_base=1"}, {"seed_base=2", "optimizer.kind=sgd", "data.seed=5"}),
            (Differences{"seed_base 1 -> 2", "data.seed 0 -> 5", "optimizer.kind adamw -> sgd"}));
  EXPECT_EQ(between({}, {"runners.autocast=fp16", "runners.loss_scale.growth_steps=5"}),
            (Differences{"runners.autocast off -> fp16", "runners.loss_scale.growth_steps 2000 -> 5"}));
  EXPECT_EQ(between({}, {"runners.share=measured"}), Differences{"runners.share even -> measured"});
  EXPECT_EQ(between({"model.options.depth=1", "model.options.width=2"},
                    {"model.options.width=2", "model.options.heads=4"}),
            (Differences{R"(model.options.depth "1" -> (none))", R"(model.options.heads (none) -> "4")"}));
}

TEST(Differences, AreNotTheRest) {
  EXPECT_EQ(between({}, {}), Differences{});
  EXPECT_EQ(
      between({}, {"step_timeout=5", "runners.on_loss=fail", "checkpoint.directory=d", "checkpoint.every=3",
                   "launch.nprocs=3", "train.progress_every_s=1", "train.steps=7", "memory.limit_bytes=5"}),
      Differences{});
}

TEST(Differences, AreTheStepsWhereTheLearningRateFollowsThem) {
  const Sets cosine{"optimizer.schedule=cosine", "train.steps=100"};
  EXPECT_EQ(between(cosine, {"optimizer.schedule=cosine", "train.steps=200"}),
            Differences{"train.steps 100 -> 200"});
}

}  // namespace
}  // namespace accelmgr::config
