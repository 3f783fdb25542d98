// Checks the master gradients after a step: what steps accumulate, each parameter's own gradient, and the
// configured weights and dtypes.
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "libtorch/model/layers.hpp"
#include "libtorch/tensor/generator.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

/// Parameters in float64, some of which take part in some micro-batches only. A batch has one element, whose
/// number tells step, rank and micro-batch.
class Selective final : public model::ParameterModel {
 public:
  explicit Selective(const Config& config)
      : ranks_(config.nprocs), accumulation_(config.grad_accumulation_steps) {
    always_ = parameter("always", vector(0.5));
    frozen_ = parameter("frozen", vector(0.25)).set_requires_grad(false);
    parameter("never", vector(1.0));
    even_steps_ = parameter("even_steps", vector(0.75));
    second_micro_batch_ = parameter("second_micro_batch", vector(1.25));
    rank_1_ = parameter("rank_1", vector(1.5));
    rows_ = parameter("rows", at::ones({5, 4}, at::kDouble));
    encoder_ = parameter("encoder", at::full({4, 4}, 0.3, at::kDouble));
    tie("decoder", encoder_);
  }

  Outputs forward(const Batch& batch) override {
    const auto& input = batch["input"];
    const auto& number = batch["number"];
    const auto element = number.item().toLong();
    const auto step = element / (ranks_ * accumulation_);
    const auto micro_batch = element / ranks_ % accumulation_;
    auto sum = always_.mul(always_).add(frozen_);
    if (step % 2 == 0) sum = sum.add(even_steps_.mul(even_steps_));
    if (micro_batch == 1) sum = sum.add(second_micro_batch_.mul(second_micro_batch_));
    if (element % ranks_ == 1) sum = sum.add(rank_1_.mul(rank_1_));
    const auto row = at::embedding(rows_, number.remainder(3), -1, false, /*sparse=*/true);
    const auto decoded = at::linear(at::tanh(at::linear(input, encoder_)), encoder_);
    const auto loss = sum.add(row.mul(row)).mul(input).sum().add(decoded.sum());
    return {loss, {{"number", static_cast<double>(element)}}};
  }

 private:
  static at::Tensor vector(double value) { return at::full({4}, value, at::kDouble); }

  int ranks_, accumulation_;
  at::Tensor always_, frozen_, even_steps_, second_micro_batch_, rank_1_, rows_, encoder_;
};

const RegisteredModel selective("selective",
                                [](const Config& config) { return std::make_unique<Selective>(config); });

Config selective_config() {
  auto config = small_config("selective");
  config.data.kind = "numbered";
  config.batch_size_per_device = 1;
  config.grad_accumulation_steps = 2;
  return config;
}

at::Tensor gradient_of(const Manager& manager, const std::string& name) {
  for (const auto& gradient : manager.gradients())
    if (gradient.name == name) return gradient.tensor;
  ADD_FAILURE() << "no gradient '" << name << "'";
  return {};
}

bool touched(const Manager& manager, const std::string& name) {
  const auto& gradients = manager.gradients();
  const auto found = std::ranges::find(gradients, name, &NamedTensor::name);
  return manager.touched().at(static_cast<std::size_t>(found - gradients.begin()));
}

bool all_zero(const at::Tensor& tensor) { return tensor.eq(0).all().item().toBool(); }

std::vector<at::Tensor> sum_of(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  std::vector<at::Tensor> out;
  std::ranges::transform(a, b, std::back_inserter(out),
                         [](const auto& x, const auto& y) { return x.add(y); });
  return out;
}

TEST(Accumulate, StepsAddTheirMeansUntilAStepOverwritesOrTheHostZeroes) {
  const auto config = selective_config();
  auto manager = Manager::start(config);
  Reference reference(config);
  const auto parameters = copies(manager.parameters());
  for (const auto& group : manager.groups()) EXPECT_TRUE(all_zero(group.gradients)) << "before any step";

  auto expected = reference.step(parameters).gradients;
  expect_ok(manager);
  for (int step = 1; step < 3; ++step) {
    expected = sum_of(expected, reference.step(parameters).gradients);
    expect_ok(manager);
    EXPECT_LE(distance(copies(manager.gradients()), expected), 1e-12);
  }
  expected = reference.step(parameters).gradients;
  expect_ok(manager, {.accumulate = false});
  EXPECT_LE(distance(copies(manager.gradients()), expected), 1e-12);

  manager.zero_grad();
  for (const auto& [name, gradient] : manager.gradients())
    EXPECT_TRUE(same_bits({gradient}, {at::zeros_like(gradient)})) << name;
  expected = reference.step(parameters).gradients;
  expect_ok(manager);
  EXPECT_LE(distance(copies(manager.gradients()), expected), 1e-12);
}

TEST(Repeat, ComputesOnTheElementsOfTheLastStepAgain) {
  auto config = selective_config();
  config.data.keep_last_step = true;
  auto manager = Manager::start(config);
  EXPECT_THROW(manager.step({.repeat = true}), UsageError) << "there is no last step";
  for (int step = 0; step < 3; ++step) {
    expect_ok(manager, {.accumulate = false});
    const auto first = copies(manager.gradients());
    expect_ok(manager, {.accumulate = false, .repeat = true});
    EXPECT_TRUE(same_bits(copies(manager.gradients()), first));
    expect_ok(manager, {.repeat = true});
    EXPECT_LE(distance(copies(manager.gradients()), sum_of(first, first)), 1e-12);
    EXPECT_EQ(manager.statistics().elements, 4u * static_cast<unsigned>(step + 1));
  }
  auto other = Manager::start(selective_config());
  expect_ok(other);
  EXPECT_THROW(other.step({.repeat = true}), UsageError) << "data.keep_last_step is off";
}

TEST(Touched, AreParametersThatAStepHasUsedSinceGradientsWereZeroed) {
  auto manager = Manager::start(selective_config());
  EXPECT_FALSE(touched(manager, "always")) << "before any step";
  expect_ok(manager);
  for (const auto* name : {"always", "even_steps", "second_micro_batch", "rank_1", "rows"})
    EXPECT_TRUE(touched(manager, name)) << name;
  for (const auto* name : {"never", "frozen"}) EXPECT_FALSE(touched(manager, name)) << name;
  expect_ok(manager);
  EXPECT_TRUE(touched(manager, "even_steps")) << "accumulated";
  expect_ok(manager);
  expect_ok(manager, {.accumulate = false});
  EXPECT_FALSE(touched(manager, "even_steps")) << "overwritten";
  EXPECT_TRUE(touched(manager, "always"));
  manager.zero_grad();
  EXPECT_FALSE(touched(manager, "always"));
}

TEST(Gradients, AndScalarsOfPartlyUsedParametersAreThoseOfOneProcess) {
  const auto config = selective_config();
  auto manager = Manager::start(config);
  Reference reference(config);
  const auto parameters = copies(manager.parameters());
  for (int step = 0; step < 4; ++step) {
    const auto expected = reference.step(parameters);
    const auto result = expect_ok(manager, {.accumulate = false});
    EXPECT_NEAR(result.loss, expected.loss, 1e-12);
    ASSERT_EQ(result.scalars.size(), 1u);
    EXPECT_EQ(result.scalars[0].first, "number");
    EXPECT_DOUBLE_EQ(result.scalars[0].second, expected.scalars.at("number"));
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& [name, gradient] = manager.gradients()[i];
      EXPECT_LE(distance({gradient}, {expected.gradients[i]}), 1e-12) << name << " in step " << step;
    }
    EXPECT_TRUE(all_zero(gradient_of(manager, "frozen")));
    EXPECT_TRUE(all_zero(gradient_of(manager, "never")));
    EXPECT_EQ(all_zero(gradient_of(manager, "even_steps")), step % 2 == 1);
    EXPECT_FALSE(all_zero(gradient_of(manager, "second_micro_batch")));
    EXPECT_FALSE(all_zero(gradient_of(manager, "rank_1")));
    EXPECT_TRUE(all_zero(gradient_of(manager, "rows").narrow(0, 3, 2))) << "rows that nobody looked up";
  }
  EXPECT_TRUE(same_bits(copies(manager.parameters()), parameters)) << "a step writes no parameter";
}

TEST(Gradients, OfAFrozenParameterStayAsTheHostWroteThem) {
  auto manager = Manager::start(selective_config());
  const auto frozen = std::ranges::find(manager.parameters(), "frozen", &NamedTensor::name);
  ASSERT_NE(frozen, manager.parameters().end());
  EXPECT_FALSE(frozen->tensor.requires_grad());
  const auto mark = gradient_of(manager, "frozen").fill_(7).clone();
  expect_ok(manager);
  EXPECT_TRUE(same_bits({gradient_of(manager, "frozen")}, {mark}));
}

TEST(Gradients, OfRunnersInBfloat16AreNearThoseInFloat32) {
  for (const auto* kind : {"mlp", "convnet", "gpt"}) {
    auto config = small_config(kind);
    config.data.kind = "synthetic";
    config.model.gpt.dropout = 0;
    auto manager = Manager::start(config);
    config.runners.parameters = RunnerParameters::bf16;
    auto rounded = Manager::start(config);
    expect_ok(manager);
    expect_ok(rounded);
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < manager.gradients().size(); ++i) {
      const auto& expected = manager.gradients()[i].tensor;
      const auto& gradient = rounded.gradients()[i].tensor;
      ASSERT_EQ(gradient.scalar_type(), at::kFloat);
      difference += std::pow(gradient.sub(expected).norm().item<double>(), 2);
      norm += std::pow(expected.norm().item<double>(), 2);
    }
    EXPECT_GT(difference, 0) << kind;
    EXPECT_LT(std::sqrt(difference / norm), 0.2) << kind;
  }
}

TEST(Gradients, TiedWeightsAreStoredAndReducedOnce) {
  auto manager = Manager::start(selective_config());
  const auto named = [](const std::vector<NamedTensor>& tensors, const std::string& name) {
    return std::ranges::count(tensors, name, &NamedTensor::name);
  };
  EXPECT_EQ(named(manager.parameters(), "encoder"), 1);
  EXPECT_EQ(named(manager.parameters(), "decoder"), 0);
  EXPECT_EQ(manager.gradients().size(), manager.parameters().size());
  const auto state = manager.state_dict();
  EXPECT_EQ(state.size(), manager.parameters().size() + 1);
  EXPECT_EQ(named(state, "encoder"), 1);
  EXPECT_EQ(named(state, "decoder"), 1);
  const auto decoder = std::ranges::find(state, "decoder", &NamedTensor::name);
  ASSERT_NE(decoder, state.end());
  EXPECT_TRUE(decoder->tensor.equal(at::full({4, 4}, 0.3, at::kDouble)));
}

class UnderAutocast : public testing::TestWithParam<Autocast> {};

TEST_P(UnderAutocast, GradientsAreNearThoseWithoutIt) {
  const auto run = [](const std::string& kind, Autocast autocast) {
    auto config = small_config(kind);
    config.runners.autocast = autocast;
    auto manager = Manager::start(config);
    const auto loss = expect_ok(manager).loss;
    return std::pair(copies(manager.gradients()), loss);
  };
  for (const std::string kind : {"mlp", "convnet", "gpt"}) {
    const auto [gradients, loss] = run(kind, GetParam());
    const auto [exact_gradients, exact_loss] = run(kind, Autocast::off);
    EXPECT_NEAR(loss, exact_loss, 0.01 * exact_loss) << kind;
    EXPECT_NE(loss, exact_loss) << "autocast was off";
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      EXPECT_EQ(gradients[i].scalar_type(), at::kFloat);
      // BatchNorm over few values and ReLU amplify rounding: only the direction is compared.
      EXPECT_GT(gradients[i].mul(exact_gradients[i]).sum().item().toDouble(),
                0.5 * exact_gradients[i].norm().square().item().toDouble())
          << kind << " " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Gradients, UnderAutocast, testing::Values(Autocast::bf16, Autocast::fp16),
                         [](const auto& info) { return info.param == Autocast::bf16 ? "bf16" : "fp16"; });

/// A step of 2 ranks x 2 micro-batches x 2 elements, and too few elements for a second full step. The test
/// parameters say whether losses are weighed by samples, and how many elements are left.
class ShortStep : public testing::TestWithParam<std::tuple<bool, int>> {
 protected:
  Config config(bool drop_last) const {
    const auto [by_samples, left] = GetParam();
    auto config = small_config("mlp");
    config.batch_size_per_device = 2;
    config.grad_accumulation_steps = 2;
    config.loss_scaling = by_samples ? LossScaling::samples : LossScaling::runners;
    config.data.elements = 8 + left;
    config.data.epochs = 1;
    config.data.drop_last = drop_last;
    return config;
  }
};

TEST_P(ShortStep, HasItsTrueDivisorAndSamples) {
  auto manager = Manager::start(config(false));
  Reference reference(config(false));
  const auto parameters = copies(manager.parameters());
  for (const auto samples : {8, std::get<int>(GetParam())}) {
    const auto expected = reference.step(parameters);
    const auto result = expect_ok(manager, {.accumulate = false});
    EXPECT_LE(distance(copies(manager.gradients()), expected.gradients), 1e-6);
    EXPECT_NEAR(result.loss, expected.loss, 1e-6);
    EXPECT_EQ(result.samples, samples);
  }
  EXPECT_EQ(manager.step().status, StepStatus::data_end);
  EXPECT_EQ(manager.statistics().samples, 8 + std::get<int>(GetParam()));
}

TEST_P(ShortStep, IsLeftOutUnderDropLast) {
  auto manager = Manager::start(config(true));
  expect_ok(manager);
  const auto gradients = copies(manager.gradients());
  const auto result = manager.step();
  EXPECT_EQ(result.status, StepStatus::data_end);
  EXPECT_FALSE(result.counted);
  EXPECT_EQ(result.samples, 0u);
  EXPECT_EQ(result.step, 1u);
  EXPECT_TRUE(same_bits(copies(manager.gradients()), gradients));
  EXPECT_EQ(manager.statistics().samples, 8u);
}

// With 7 elements left, rank 0 has two micro-batches and rank 1 one and a half. With 5, they have one and a
// half, and one. With 1, rank 0 has half a micro-batch and rank 1 has none.
INSTANTIATE_TEST_SUITE_P(Scaling, ShortStep, testing::Combine(testing::Bool(), testing::Values(7, 5, 1)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "BySamples" : "ByRunners") +
                                  std::to_string(std::get<1>(info.param));
                         });

/// Draws a number in each forward().
class Drawing final : public model::ParameterModel {
 public:
  Outputs forward(const Batch& batch) override {
    const auto drawn = at::rand({1}, at::kDouble).item().toDouble();
    return {weight_.mul(batch["input"]).sum(), {{"drawn", drawn}}};
  }

 private:
  at::Tensor weight_ = parameter("weight", at::ones({4}, at::kDouble));
};

const RegisteredModel drawing("drawing", [](const Config&) { return std::make_unique<Drawing>(); });

TEST(Generators, RunnersDrawTheirOwnNumbersAndGoOnWhereTheyWere) {
  auto config = small_config("drawing");
  config.data.kind = "numbered";
  auto manager = Manager::start(config);
  std::array<double, 3> expected{};
  for (const auto rank : {0, 1}) {
    tensor::seed_generator(config.seed_base + static_cast<std::uint64_t>(rank));
    for (auto& mean : expected) mean += at::rand({1}, at::kDouble).item().toDouble() / 2;
  }
  for (const auto mean : expected) EXPECT_DOUBLE_EQ(expect_ok(manager).scalars.at(0).second, mean);
}

}  // namespace
}  // namespace accelmgr::test
