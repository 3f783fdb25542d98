#include "tensor/take_over.hpp"

#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <gtest/gtest.h>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>
#include <limits>
#include <utility>

#include "session/manifest.hpp"

namespace accelmgr::tensor {
namespace {

constexpr std::int64_t width = 256;

// y = W2 relu(W1 x + b1): with a batch of `width` rows, the gradients of activations are as large as the
// weights'.
struct Network {
  at::Tensor w1 = at::randn({width, width}).requires_grad_();
  at::Tensor b1 = at::randn({width}).requires_grad_();
  at::Tensor w2 = at::randn({width, width}).requires_grad_();

  std::vector<NamedTensor> parameters() const { return {{"w1", w1}, {"b1", b1}, {"w2", w2}}; }
  at::Tensor loss(const at::Tensor& x) const {
    return at::linear(at::relu(at::linear(x, w1, b1)), w2).pow(2).mean();
  }
};

// One take-over serves all tests: a process has one rank.
struct Taken {
  Network network;
  ModelTensors model = describe(network.parameters(), {});
  session::Manifest manifest = model.manifest;
  session::Session session = make(manifest);
  TakeOver take_over{session, manifest, model, 0};
  std::uint64_t attempt = 0;

  static session::Session make(session::Manifest& manifest) {
    session::Extent extent{.ranks = 1, .element = session::Element::f32};
    extent.elements = manifest.place_tensors(extent.element);
    extent.tensors = manifest.tensors.size();
    extent.manifest_bytes = session::manifest_bytes(manifest);
    return session::Session::create(extent, extent.ranks, 1);
  }
  at::Tensor slab(std::size_t i) const {
    return master_view(session.slab(0), model.element, manifest.tensors[i]);
  }
  std::uint64_t tag(std::size_t i) const { return session.tags(0)[i].load(); }
};

class TakeOverTest : public testing::Test {
 protected:
  static Taken& taken() {
    static Taken instance;
    return instance;
  }
  void SetUp() override { taken().take_over.begin(++taken().attempt); }

  /// What autograd says by itself, for the sum over `inputs`.
  static std::vector<at::Tensor> expected(const std::vector<at::Tensor>& inputs) {
    Network plain;
    plain.w1.set_data(taken().network.w1.detach().clone());
    plain.b1.set_data(taken().network.b1.detach().clone());
    plain.w2.set_data(taken().network.w2.detach().clone());
    for (const auto& x : inputs) plain.loss(x).backward();
    return {plain.w1.grad(), plain.b1.grad(), plain.w2.grad()};
  }
};

TEST_F(TakeOverTest, TheSlabHoldsTheGradientAndTheParameterNone) {
  const auto x = at::randn({3, width});
  taken().take_over.backward(taken().network.loss(x));
  const auto gradients = expected({x});
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(taken().slab(i).equal(gradients[i])) << i;
    EXPECT_EQ(taken().tag(i), taken().attempt);
    EXPECT_FALSE(taken().model.parameters[i].tensor.grad().defined());
  }
  EXPECT_EQ(taken().take_over.nonfinite(), std::vector<std::string>{});
}

TEST_F(TakeOverTest, ASecondMicroBatchIsAdded) {
  const auto x = at::randn({3, width}), y = at::randn({5, width});
  taken().take_over.backward(taken().network.loss(x));
  taken().take_over.backward(taken().network.loss(y));
  const auto gradients = expected({x, y});
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(taken().slab(i).equal(gradients[i])) << i;
}

TEST_F(TakeOverTest, AParameterFirstUsedInTheSecondMicroBatchIsCopiedNotAdded) {
  taken().slab(0).fill_(1000);
  const auto& n = taken().network;
  const auto x = at::randn({3, width});
  taken().take_over.backward(at::linear(x, n.w2).pow(2).mean());
  EXPECT_NE(taken().tag(0), taken().attempt) << "w1 was not used";
  taken().take_over.backward(n.loss(x));
  EXPECT_TRUE(taken().slab(0).equal(expected({x})[0]));
}

TEST_F(TakeOverTest, OtherTensorsOfAGradientsSizeDoNoHarm) {
  const auto x = at::randn({width, width});
  for (int repetition = 0; repetition < 3; ++repetition) {
    taken().take_over.begin(++taken().attempt);
    taken().take_over.backward(taken().network.loss(x));
    const auto gradients = expected({x});
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(taken().slab(i).equal(gradients[i])) << i;
  }
}

TEST_F(TakeOverTest, TheFirstParameterThatIsNotFiniteIsNamed) {
  const auto x = at::randn({3, width});
  taken().take_over.backward(taken().network.loss(x).mul(std::numeric_limits<double>::infinity()));
  EXPECT_EQ(taken().take_over.nonfinite().front(), "w2") << "backward meets the last weight first";
  taken().take_over.begin(++taken().attempt);
  taken().take_over.backward(taken().network.loss(x));
  EXPECT_EQ(taken().take_over.nonfinite(), std::vector<std::string>{});
}

TEST_F(TakeOverTest, AGradientThatAHookKeepsStaysAsItWas) {
  const auto x = at::randn({3, width});
  at::Tensor kept;
  const auto hook = taken().network.w2.register_hook([&](const at::Tensor& gradient) { kept = gradient; });
  taken().take_over.backward(taken().network.loss(x));
  const auto before = kept.clone();
  taken().network.w2.remove_hook(hook);
  EXPECT_TRUE(taken().slab(2).equal(before));
  const auto y = at::randn({3, width});
  taken().take_over.begin(++taken().attempt);
  taken().take_over.backward(taken().network.loss(y));
  EXPECT_TRUE(taken().slab(2).equal(expected({y})[2]));
  EXPECT_TRUE(kept.equal(before));
}

// The node of a product makes both gradients at once: here they have one size, as in LoRA's B A.
TEST_F(TakeOverTest, OneNodeMayMakeTwoGradientsOfOneSize) {
  const auto x = at::randn({3, width});
  const auto loss = [&x](const at::Tensor& a, const at::Tensor& b) {
    return at::linear(x, at::matmul(a, b)).pow(2).mean();
  };
  const auto& n = taken().network;
  taken().take_over.backward(loss(n.w2, n.w1));
  const auto a = n.w2.detach().clone().requires_grad_(), b = n.w1.detach().clone().requires_grad_();
  loss(a, b).backward();
  EXPECT_TRUE(taken().slab(2).equal(a.grad()));
  EXPECT_TRUE(taken().slab(0).equal(b.grad()));
}

TEST_F(TakeOverTest, AHookOfTheModelAfterAccumulationSeesTheSumOfMicroBatches) {
  class Note : public torch::autograd::PostAccumulateGradHook {
   public:
    explicit Note(std::vector<at::Tensor>& seen) : seen_(seen) {}
    void operator()(const at::Tensor& parameter) override { seen_.push_back(parameter.grad().clone()); }

   private:
    std::vector<at::Tensor>& seen_;
  };
  const auto x = at::randn({3, width}), y = at::randn({3, width});
  std::vector<at::Tensor> seen;
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(taken().network.w1);
  auto ours = std::exchange(hook, std::make_unique<Note>(seen));
  taken().take_over.backward(taken().network.loss(x));
  taken().take_over.backward(taken().network.loss(y));
  taken().take_over.finish();
  hook = std::move(ours);
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen[0].equal(expected({x})[0]));
  EXPECT_TRUE(seen[1].equal(expected({x, y})[0]));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(taken().slab(i).equal(expected({x, y})[i])) << i;
  EXPECT_FALSE(taken().network.w1.grad().defined());
}

TEST_F(TakeOverTest, WhatAnAttemptLeftThatWasGivenUpIsGone) {
  const auto x = at::randn({3, width});
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(taken().network.w1);
  auto ours = std::exchange(hook, nullptr);
  taken().take_over.backward(taken().network.loss(x));
  taken().take_over.begin(++taken().attempt);
  taken().take_over.backward(taken().network.loss(x));
  taken().take_over.finish();
  hook = std::move(ours);
  EXPECT_TRUE(taken().slab(0).equal(expected({x})[0]));
}

}  // namespace
}  // namespace accelmgr::tensor
