// Checks that users can leave members out of designated initializers. All tests are compiled with -Wextra,
// which would warn of members without a default.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/communicator.hpp"
#include "accelmgr/launch.hpp"
#include "accelmgr/manager.hpp"
#include "accelmgr/model.hpp"
#include "accelmgr/multiprocess.hpp"

namespace accelmgr::test {
namespace {

/// A model as users write it.
class Mean final : public Model {
 public:
  std::vector<NamedTensor> parameters() override { return {{.name = "scale", .tensor = scale_}}; }
  std::vector<NamedTensor> buffers() override { return {}; }
  void train(bool) override {}
  Outputs forward(const Batch& batch) override { return {.loss = batch["input"].mul(scale_).mean()}; }

 private:
  at::Tensor scale_ = at::ones({1}).requires_grad_();
};

TEST(Aggregates, OfAModelAndASourceMayLeaveMembersOut) {
  Mean model;
  const auto outputs = model.forward(Batch({{.name = "input", .tensor = at::ones({4})}}));
  EXPECT_EQ(outputs.loss.item<float>(), 1);
  EXPECT_TRUE(outputs.scalars.empty());
  const FieldSpec number{.name = "number"};
  EXPECT_EQ(number.dtype, at::kFloat);
  EXPECT_TRUE(number.shape.empty());
  EXPECT_FALSE(NamedTensor{.name = "nothing"}.tensor.defined());
}

TEST(Aggregates, OfAConfigurationMayLeaveMembersOut) {
  const Config config{.nprocs = 3, .model = {.kind = "mlp"}, .checkpoint = {.every = 5}};
  EXPECT_EQ(config.model.mlp, MlpConfig{});
  EXPECT_EQ(config.checkpoint.directory, "");
  EXPECT_EQ((DataConfig{.kind = "text"}.files.size()), 0u);
  EXPECT_EQ((LaunchConfig{.nprocs = 2}.rendezvous), "");
}

TEST(Aggregates, OfAManagerAndALaunchMayLeaveMembersOut) {
  EXPECT_TRUE((StepOptions{.accumulate = false}.parameters_changed));
  EXPECT_EQ((StartOptions{.method = StartMethod::fork}.prepared), nullptr);
  EXPECT_EQ((CheckpointExtras{.metric = 1.0}.json), "{}");
  EXPECT_EQ((CheckpointWritten{.step = 1}.error), "");
  EXPECT_EQ((Resumed{.step = 1}.path), "");
  EXPECT_EQ((RunnerStatistics{.rank = 1}.phase), "");
  EXPECT_TRUE((Statistics{.steps = 1}.runners.empty()));
  EXPECT_EQ((StepResult{.counted = true}.error), "");
  EXPECT_EQ((FlatGroup{.kind = FlatGroup::Kind::frozen}.parameters.defined()), false);
  EXPECT_EQ((launch::Options{.nprocs = 2}.backend), "auto");
  EXPECT_EQ((Failure{.rank = 2}.what), "");
  EXPECT_FALSE((MultiprocessConfig{.rank = 1}.master_port));
}

}  // namespace
}  // namespace accelmgr::test
