#include <ATen/core/grad_mode.h>

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

}  // namespace
}  // namespace accelmgr::test
