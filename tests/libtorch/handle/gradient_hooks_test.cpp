#include "libtorch/handle/gradient_hooks.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/real.h>
#include <ATen/ops/relu.h>
#include <gtest/gtest.h>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace accelmgr::libtorch {
namespace {

constexpr std::int64_t width = 256;

// y = W2 relu(W1 x + b1). For a batch of `width` rows, the gradients of activations have the size of the
// weights' gradients.
struct Network {
  at::Tensor w1 = at::randn({width, width}).requires_grad_();
  at::Tensor b1 = at::randn({width}).requires_grad_();
  at::Tensor w2 = at::randn({width, width}).requires_grad_();

  at::Tensor loss(const at::Tensor& x) const {
    return at::linear(at::relu(at::linear(x, w1, b1)), w2).pow(2).mean();
  }
};

/// Sums the gradients that the hooks hand over.
class Sums final : public replica::GradientSink {
 public:
  explicit Sums(std::vector<at::Tensor> like) : like_(std::move(like)), sums_(like_.size()) {}
  void capture(std::size_t index, const void* gradient) override {
    const auto taken = at::from_blob(const_cast<void*>(gradient), like_[index].sizes(), at::kFloat).clone();
    sums_[index] = sums_[index].defined() ? sums_[index].add(taken) : taken;
  }

  void begin() { sums_.assign(like_.size(), {}); }
  const at::Tensor& operator[](std::size_t index) const { return sums_[index]; }

 private:
  std::vector<at::Tensor> like_, sums_;
};

class GradientHooksTest : public testing::Test {
 protected:
  GradientHooksTest() { begin(); }
  void begin() {
    sums.begin();
    hooks.begin();
  }
  void backward(const at::Tensor& loss) {
    hooks.begin_backward();
    loss.backward();
    hooks.end_backward();
  }
  /// The gradients of plain autograd, summed over `inputs`.
  std::vector<at::Tensor> expected(const std::vector<at::Tensor>& inputs) const {
    Network plain;
    plain.w1.set_data(network.w1.detach().clone());
    plain.b1.set_data(network.b1.detach().clone());
    plain.w2.set_data(network.w2.detach().clone());
    for (const auto& x : inputs) plain.loss(x).backward();
    return {plain.w1.grad(), plain.b1.grad(), plain.w2.grad()};
  }

  Network network;
  std::vector<at::Tensor> parameters{network.w1, network.b1, network.w2};
  Sums sums{parameters};
  GradientHooks hooks{parameters, sums};
};

TEST(DenseGradient, OfAConjugatedViewHasItsValues) {
  const auto parameter = at::ones({3}, at::kComplexFloat).requires_grad_();
  const auto factors = at::complex(at::ones({3}), at::arange(3.0F));
  at::real(parameter.conj().mul(factors)).sum().backward();
  ASSERT_TRUE(parameter.grad().is_conj());
  const auto dense = dense_gradient(parameter);
  EXPECT_FALSE(dense.is_conj());
  EXPECT_TRUE(at::equal(dense, parameter.grad().resolve_conj()));
}

TEST_F(GradientHooksTest, WhatForwardLeavesInGradCountsUnlessItDropsIt) {
  const auto x = at::randn({3, width}), y = at::randn({5, width});
  hooks.begin_micro_batch();
  network.loss(x).backward();
  for (const auto& parameter : parameters) parameter.mutable_grad().reset();
  backward(network.loss(y));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(sums[i].equal(expected({y})[i])) << i;
  begin();
  hooks.begin_micro_batch();
  network.w1.pow(2).sum().backward();  // The loss does not depend on it.
  backward(network.w2.pow(2).sum());
  EXPECT_TRUE(sums[0].equal(at::mul(network.w1.detach(), 2)));
  EXPECT_TRUE(sums[2].equal(at::mul(network.w2.detach(), 2)));
}

TEST_F(GradientHooksTest, AGradientThatAHookKeepsStaysAsItWas) {
  const auto x = at::randn({3, width});
  at::Tensor kept;
  const auto hook = network.w2.register_hook([&](const at::Tensor& gradient) { kept = gradient; });
  backward(network.loss(x));
  const auto before = kept.clone();
  network.w2.remove_hook(hook);
  EXPECT_TRUE(sums[2].equal(before));
  const auto y = at::randn({3, width});
  begin();
  backward(network.loss(y));
  EXPECT_TRUE(sums[2].equal(expected({y})[2]));
  EXPECT_TRUE(kept.equal(before));
}

TEST_F(GradientHooksTest, AHookOfTheModelAfterAccumulationSeesTheSumOfMicroBatches) {
  class Note : public torch::autograd::PostAccumulateGradHook {
   public:
    explicit Note(std::vector<at::Tensor>& seen) : seen_(seen) {}
    void operator()(const at::Tensor& parameter) override { seen_.push_back(parameter.grad().clone()); }

   private:
    std::vector<at::Tensor>& seen_;
  };
  const auto x = at::randn({3, width}), y = at::randn({3, width});
  std::vector<at::Tensor> seen;
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(network.w1);
  auto ours = std::exchange(hook, std::make_unique<Note>(seen));
  backward(network.loss(x));
  backward(network.loss(y));
  hooks.finish();
  hook = std::move(ours);
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen[0].equal(expected({x})[0]));
  EXPECT_TRUE(seen[1].equal(expected({x, y})[0]));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(sums[i].equal(expected({x, y})[i])) << i;
  EXPECT_FALSE(network.w1.grad().defined());
}

TEST_F(GradientHooksTest, WhatAnAttemptLeftThatWasGivenUpIsGone) {
  const auto x = at::randn({3, width});
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(network.w1);
  auto ours = std::exchange(hook, nullptr);
  backward(network.loss(x));
  begin();
  backward(network.loss(x));
  hooks.finish();
  hook = std::move(ours);
  EXPECT_TRUE(sums[0].equal(expected({x})[0]));
}

}  // namespace
}  // namespace accelmgr::libtorch
