#include <ATen/core/grad_mode.h>

#include "model/autocast.hpp"
#include "model/checked_loss.hpp"
#include "model/support.hpp"

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
  expect_contains(message_of<ModelError>([&] { checked_loss(outputs(detached)); }), {"requires no gradient"});
  const at::NoGradGuard no_grad;
  EXPECT_NO_THROW(checked_loss(outputs(detached)));
}

TEST(Autocast, LastsAsLongAsItsOutermostScope) {
  EXPECT_FALSE(model::autocast_enabled());
  {
    const AutocastScope outer(true);
    {
      const AutocastScope inner(true);
      const AutocastScope off(false);
      EXPECT_TRUE(model::autocast_enabled());
    }
    EXPECT_TRUE(model::autocast_enabled());
  }
  EXPECT_FALSE(model::autocast_enabled());
  const AutocastScope off(false);
  EXPECT_FALSE(model::autocast_enabled());
}

class AutocastOf : public testing::TestWithParam<std::string> {};

TEST_P(AutocastOf, TheModelTrainsInBfloat16NearItsFullPrecision) {
  auto config = config_of(GetParam());
  config.model.gpt.dropout = 0;
  const auto made = make(config);
  const auto batch = batch_of(GetParam());
  const auto full = value_of(made->forward(batch));
  const auto reference = gradients(*made, batch);
  at::Tensor loss;
  {
    const AutocastScope autocast(true);
    loss = checked_loss(made->forward(batch));
  }
  loss.backward();
  EXPECT_NE(loss.item().toDouble(), full) << "nothing was computed in bfloat16";
  EXPECT_NEAR(loss.item().toDouble(), full, 0.05 * full);
  const auto parameters = made->parameters();
  for (std::size_t i = 0; i < reference.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    EXPECT_EQ(tensor.grad().scalar_type(), at::kFloat) << name;
    // BatchNorm over few values and ReLU amplify what rounding does to the gradient: its direction is what
    // stays.
    EXPECT_GT(tensor.grad().mul(reference[i]).sum().item().toDouble(),
              0.5 * reference[i].norm().square().item().toDouble())
        << name;
  }
}

INSTANTIATE_TEST_SUITE_P(BuiltIn, AutocastOf, testing::Values("mlp", "convnet", "gpt"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace accelmgr::test
