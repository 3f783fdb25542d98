// Checks that a run whose optimizer resumes from a checkpoint ends with the bits of one whole run.
#include <gtest/gtest.h>

#include "accelmgr/optimizer.hpp"
#include "support.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {
namespace {

constexpr std::uint64_t steps_per_update = 2;

class OptimizerResume : public testing::Test {
 protected:
  /// Trains, and returns all tensors of the result.
  std::vector<at::Tensor> train(const Config& config, std::uint64_t steps, bool saves) const {
    auto manager = Manager::start(config);
    Optimizer optimizer(config.optimizer, manager.groups(), 100);
    if (manager.resumed()) optimizer.load_state(manager.resumed()->tensors);
    for (auto done = manager.statistics().steps; done < steps; ++done) {
      expect_ok(manager, {.accumulate = done % steps_per_update != 0});
      const auto writing = manager.writing();
      if ((done + 1) % steps_per_update == 0) optimizer.step();
    }
    if (saves) {
      manager.save_checkpoint({.tensors = optimizer.state()});
      EXPECT_EQ(manager.checkpoints_written(30).at(0).error, "");
    }
    auto end = copies(manager.parameters());
    for (const auto& part :
         {copies(manager.gradients()), copies(manager.buffers()), copies(optimizer.state())})
      end.insert(end.end(), part.begin(), part.end());
    return end;
  }

  /// Stops after five steps, within an update, and resumes up to twelve. The result must be that of one run.
  void expect_goes_on(Config config) const {
    config.checkpoint.directory = folder_.path();
    config.optimizer.steps_per_update = steps_per_update;
    const auto expected = train(config, 12, false);
    train(config, 5, true);
    config.checkpoint.resume = "latest";
    EXPECT_TRUE(same_bits(train(config, 12, false), expected));
  }

  TemporaryFolder folder_;
};

TEST_F(OptimizerResume, EndsAsOneRunWithAdamwAcrossEpochs) {
  auto config = small_config("gpt");
  config.model.gpt.dropout = 0.3;
  config.data.elements = 37;
  config.buffers.policy = BufferPolicy::mean;
  config.optimizer = {.kind = OptimizerKind::adamw,
                      .weight_decay = 0.1,
                      .clip_norm = 0.5,
                      .warmup_updates = 4,
                      .schedule = Schedule::cosine};
  expect_goes_on(config);
}

}  // namespace
}  // namespace accelmgr::test
