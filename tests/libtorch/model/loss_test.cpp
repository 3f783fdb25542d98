#include <ATen/core/grad_mode.h>

#include <string>
#include <tuple>

#include "libtorch/model/autocast.hpp"
#include "libtorch/model/checked_loss.hpp"
#include "libtorch/model/support.hpp"

namespace accelmgr::test {
namespace {

using model::AutocastScope;
using model::checked_loss;

Outputs outputs(at::Tensor loss) { return {std::move(loss), {}}; }

TEST(Loss, AScalarOfAnyFloatingTypeAndShapeOfOneElementIsTaken) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const auto loss = at::randn({1, 1}).to(dtype).set_requires_grad(true);
    EXPECT_TRUE(checked_loss(outputs(loss)).is_same(loss));
  }
}

TEST(Loss, WhatIsNoScalarIsRefusedWithItsShapeAndType) {
  const auto vector = at::randn({4, 2}).set_requires_grad(true);
  expect_contains(message_of<ModelError>([&] { checked_loss(outputs(vector)); }),
                  {"Float", "[4, 2]", "one floating-point number"});
  expect_contains(message_of<ModelError>([&] { checked_loss(outputs(integers(3, {}))); }), {"Long", "[]"});
  expect_contains(message_of<ModelError>([&] { checked_loss({}); }), {"undefined"});
}

TEST(Loss, OneThatDependsOnNoParameterIsRefusedWhereGradientsAreRecorded) {
  const auto detached = at::randn({});
  expect_contains(message_of<ModelError>([&] { checked_loss(outputs(detached)); }),
                  {"does not require a gradient"});
  const at::NoGradGuard no_grad;
  EXPECT_NO_THROW(checked_loss(outputs(detached)));
}

TEST(Autocast, LastsAsLongAsItsOutermostScope) {
  EXPECT_FALSE(model::autocast_enabled());
  {
    const AutocastScope outer(Autocast::bf16);
    {
      const AutocastScope inner(Autocast::bf16);
      const AutocastScope off(Autocast::off);
      EXPECT_TRUE(model::autocast_enabled());
    }
    EXPECT_TRUE(model::autocast_enabled());
  }
  EXPECT_FALSE(model::autocast_enabled());
  const AutocastScope off(Autocast::off);
  EXPECT_FALSE(model::autocast_enabled());
}

class AutocastOf : public testing::TestWithParam<std::tuple<std::string, Autocast>> {};

TEST_P(AutocastOf, TheModelTrainsInHalfPrecisionNearItsFullPrecision) {
  const auto& [kind, dtype] = GetParam();
  constexpr double scale = 1024;  // Gradients that float16 would round to zero are in its range then.
  auto config = config_of(kind);
  config.model.gpt.dropout = 0;
  const auto made = make(config);
  const auto batch = batch_of(kind);
  const auto full = value_of(made->forward(batch));
  const auto reference = gradients(*made, batch);
  at::Tensor loss;
  {
    const AutocastScope autocast(dtype);
    loss = checked_loss(made->forward(batch));
  }
  loss.mul(scale).backward();
  EXPECT_NE(loss.item().toDouble(), full) << "nothing was computed in half precision";
  EXPECT_NEAR(loss.item().toDouble(), full, 0.05 * full);
  const auto parameters = made->parameters();
  for (std::size_t i = 0; i < reference.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    EXPECT_EQ(tensor.grad().scalar_type(), at::kFloat) << name;
    // BatchNorm over few values and ReLU amplify the rounding of the gradient, so only its direction is
    // compared.
    EXPECT_GT(tensor.grad().div(scale).mul(reference[i]).sum().item().toDouble(),
              0.5 * reference[i].norm().square().item().toDouble())
        << name;
  }
}

std::string case_name(const testing::TestParamInfo<std::tuple<std::string, Autocast>>& info) {
  const auto& [kind, dtype] = info.param;
  return kind + (dtype == Autocast::bf16 ? "_bf16" : "_fp16");
}

INSTANTIATE_TEST_SUITE_P(BuiltIn, AutocastOf,
                         testing::Combine(testing::Values("mlp", "convnet", "gpt"),
                                          testing::Values(Autocast::bf16, Autocast::fp16)),
                         case_name);

}  // namespace
}  // namespace accelmgr::test
