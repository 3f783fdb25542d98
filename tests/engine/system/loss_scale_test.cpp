// Tests of `runners.autocast: fp16` with whole systems. The replicas compute in float32, but gradients beyond
// a limit are infinite, as those of float16 are. The scale is a power of two, so a step that has found one
// that fits must have the bits of a step without scale.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <thread>

#include "base/power_of_two.hpp"
#include "engine/client/loss_scaler.hpp"
#include "perceptrons.hpp"
#include "staged_run.hpp"
#include "temporary_folder.hpp"
#include "training.hpp"

namespace accelmgr::test {
namespace {

/// Beyond all gradients without a scale, and below some with a scale of 2^10.
constexpr double limit = 64;

Config scaled(Config config, double initial, int growth_steps = 2000) {
  config.runners.autocast = Autocast::fp16;
  config.runners.loss_scale = {.initial = initial, .growth_steps = growth_steps};
  return config;
}

Config limited_config(double gradient_limit = limit, const char* kind = perceptron) {
  return perceptron_config({.inputs = 4, .hidden = 6, .gradient_limit = gradient_limit}, kind);
}

/// What a step leaves, but for its times and attempts.
struct Left {
  double loss;
  std::uint64_t samples, elements;
  std::vector<std::pair<std::string, double>> scalars;
  Tensors gradients, buffers;
  bool operator==(const Left&) const = default;
};

Left left_by(client::Handle& manager, const StepResult& result) {
  return {result.loss,    result.samples,        manager.statistics().elements,
          result.scalars, gradients_of(manager), buffers_of(manager)};
}

struct Lowered {
  std::vector<Left> left;
  std::uint32_t lowered = 0;
};

/// Makes steps. Every second one accumulates.
Lowered run(const Config& config, int steps) {
  client::Handle manager(config, {});
  Lowered out;
  for (int step = 0; step < steps; ++step) {
    const auto result = expect_ok(manager, {.accumulate = step % 2 != 0});
    out.lowered += result.loss_scale_lowered;
    EXPECT_EQ(result.tries, 1 + result.loss_scale_lowered);
    EXPECT_TRUE(base::is_power_of_two(result.loss_scale));
    out.left.push_back(left_by(manager, result));
  }
  return out;
}

class LossScale : public testing::TestWithParam<const char*> {};

TEST_P(LossScale, IsLoweredUntilTheGradientsOfAnyModelFitAndChangesNoBit) {
  std::uint32_t lowered = 0;
  const bool ok = rc::check("as without a scale", [&] {
    PerceptronShape shape{.inputs = *rc::gen::inRange<std::int64_t>(1, 20),
                          .hidden = *rc::gen::inRange<std::int64_t>(1, 30),
                          .layers = *rc::gen::inRange(0, 3),
                          .dropout = *rc::gen::element(0.0, 0.3),
                          .tie = *rc::gen::element(Tie::none, Tie::identity, Tie::storage),
                          .gradient_limit = 0x1p14};  // The norm of a layer of width 1 divides by almost 0.
    if (*rc::gen::arbitrary<bool>()) shape.dtype = DType::float64;
    auto config = perceptron_config(shape, GetParam());
    config.nprocs = *rc::gen::inRange(1, 4);
    config.grad_accumulation_steps = *rc::gen::inRange(1, 4);
    config.seed_base = *rc::gen::inRange<std::uint64_t>(0, 1000);
    config.gradients.slab_dtype = *rc::gen::element(SlabDtype::parameters, SlabDtype::bf16);
    config.loss_scaling = *rc::gen::element(LossScaling::runners, LossScaling::samples);
    const int step_elements = config.nprocs * config.grad_accumulation_steps * config.batch_size_per_device;
    config.data.elements = 3 * step_elements + *rc::gen::inRange(1, step_elements + 1);  // The last is short.
    config.data.epochs = 1;
    config.data.drop_last = false;
    const double initial = std::ldexp(1, *rc::gen::inRange(16, 31));
    const auto with = run(scaled(config, initial), 4), without = run(config, 4);
    RC_ASSERT(without.lowered == 0u);
    RC_ASSERT(with.left == without.left);
    lowered += with.lowered;
    RC_ASSERT(!testing::Test::HasFailure());
  });
  EXPECT_TRUE(ok);
  EXPECT_GT(lowered, 0u) << "every scale fitted";
}

INSTANTIATE_TEST_SUITE_P(All, LossScale, testing::Values(perceptron, perceptron_on_fake_device),
                         [](const auto& info) { return info.param; });

TEST(LossScale, BelowOneFitsGradientsThatFloat16CannotHold) {
  constexpr double beyond_some = 0.01;
  auto config = limited_config(beyond_some);
  client::Handle unscaled(limited_config(), {}), manager(scaled(config, 4), {});
  const auto expected = expect_ok(unscaled);
  const auto result = expect_ok(manager);
  EXPECT_LT(result.loss_scale, 1);
  EXPECT_EQ(left_by(manager, result), left_by(unscaled, expected));
}

TEST(LossScale, ARunnerKilledWhileTheScaleIsLoweredIsReplacedAndTheScaleIsKept) {
  const auto config = scaled(limited_config(), 0x1p16, 3);
  const auto expected = run(config, 4);
  ASSERT_GT(expected.lowered, 2u);
  auto faulty = config;
  faulty.runners.on_loss = LossPolicy::restart;
  faulty.runners.restart_backoff = 0;
  // In all attempts but the last the other runner may refuse before this one comes to backward.
  faulty.faults = {"rank=1 step=1 phase=backward fault=kill"};
  client::Handle manager(faulty, {});
  std::uint32_t lowered = 0;
  for (std::size_t step = 0; step < 4; ++step) {
    const auto result = expect_ok(manager, {.accumulate = step % 2 != 0});
    // The attempt of the killed runner is one that the other runner may have refused.
    EXPECT_LE(result.tries, 1 + result.loss_scale_lowered + (step == 0 ? 1u : 0u));
    EXPECT_EQ(left_by(manager, result), expected.left[step]) << step;
    lowered += result.loss_scale_lowered;
  }
  EXPECT_EQ(lowered, expected.lowered);
  EXPECT_EQ(manager.statistics().replacements, 1u);
}

/// The scales of the steps up to `steps`.
std::vector<double> scales_of(client::Handle& manager, std::uint64_t steps) {
  std::vector<double> scales;
  while (manager.statistics().steps < steps) {
    const auto result = expect_ok(manager, {.accumulate = false});
    scales.push_back(result.loss_scale);
    EXPECT_EQ(result.tries, 1 + result.loss_scale_lowered);
  }
  return scales;
}

TEST(LossScale, GoesOnFromACheckpointWithItsGoodSteps) {
  const TemporaryFolder folder;
  auto config = scaled(limited_config(), 0x1p12, 3);
  config.data.epochs = 2;
  config.checkpoint.directory = folder.path();
  std::vector<double> whole;
  Left expected, actual;
  {
    client::Handle manager(config, {});
    whole = scales_of(manager, 12);
    expected = left_by(manager, {});
  }
  client::Handle first(config, {});
  auto scales = scales_of(first, 5);
  first.save_checkpoint({});
  ASSERT_EQ(first.checkpoints_written(30).size(), 1u);
  first.stop();
  config.checkpoint.resume = "latest";
  config.runners.loss_scale.initial = 2;  // Has no effect on a run that goes on.
  client::Handle second(config, {});
  for (const auto scale : scales_of(second, 12)) scales.push_back(scale);
  EXPECT_EQ(scales, whole);
  actual = left_by(second, {});
  EXPECT_EQ(actual, expected);
}

/// Two staged runners; gradients that are undefined stay so under every scale.
Config staged_with(const Stage& stage, NonfinitePolicy policy) {
  auto config = scaled(staged_config(stage), 4);
  config.on_nonfinite = policy;
  return config;
}
constexpr std::uint32_t scales_from_4_to_least = 12;  // From 2^2 to 2^-10.

TEST(Undefined, GradientsUnderTheLeastScaleEndTheStepAndALossAtOnceAndLeaveTheScaleAlone) {
  Stage stage;
  RunAfterOneStep run(staged_with(stage, NonfinitePolicy::abort));
  stage.tell(1, Act::undefined_gradient);
  const auto result = run.manager().step();
  expect_failed(result, StepStatus::nonfinite, {"rank 1", "'output.bias'", "loss scale 0.0009765625"});
  EXPECT_EQ(result.loss_scale_lowered, scales_from_4_to_least);
  stage.tell(1, Act::infinite_loss);
  const auto of_loss = run.manager().step();
  expect_failed(of_loss, StepStatus::nonfinite, {"rank 1", "the loss is inf"});
  EXPECT_EQ(of_loss.tries, 1u);
  EXPECT_EQ(of_loss.loss_scale_lowered, 0u);
  stage.tell(1, Act::compute);
  EXPECT_EQ(expect_ok(run.manager()).loss_scale, 4);
}

// The third batches are withheld until the second ones are left out, so that every one of these is undefined.
TEST(Undefined, GradientsAreLeftOutWithTheirBatches) {
  Stage stage;
  stage.withhold_elements_from(std::int64_t{2} * staged_ranks * staged_batch_size);
  RunAfterOneStep run(staged_with(stage, NonfinitePolicy::skip_batch));
  stage.tell(1, Act::undefined_gradient);
  auto step = run.step_in_background();
  while (run.manager().statistics().skips == 0) std::this_thread::yield();
  stage.tell(1, Act::compute);
  stage.release_elements();
  const auto result = step.get();
  EXPECT_EQ(result.status, StepStatus::ok) << result.error;
  EXPECT_EQ(result.skipped, 1u);
  EXPECT_EQ(result.loss_scale_lowered, scales_from_4_to_least);
  EXPECT_EQ(result.loss_scale, 4);
}

TEST(Undefined, GradientsAreKeptAndLeaveTheScaleAlone) {
  Stage stage;
  StagedRun run(staged_with(stage, NonfinitePolicy::keep));
  stage.tell(1, Act::undefined_gradient);
  const auto result = expect_ok(run.manager());
  EXPECT_TRUE(result.nonfinite);
  EXPECT_EQ(result.loss_scale, client::LossScaler::least);
  stage.tell(1, Act::compute);
  EXPECT_EQ(expect_ok(run.manager(), {.accumulate = false}).loss_scale, 4);
}

}  // namespace
}  // namespace accelmgr::test
