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
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>
#include <limits>
#include <utility>

#include "accelmgr/named_tensor.hpp"

namespace accelmgr::libtorch {
namespace {

constexpr std::int64_t width = 256;

// y = W2 relu(W1 x + b1). For a batch of `width` rows, the gradients of activations have the size of the
// weights' gradients.
struct Network {
  at::Tensor w1 = at::randn({width, width}).requires_grad_();
  at::Tensor b1 = at::randn({width}).requires_grad_();
  at::Tensor w2 = at::randn({width, width}).requires_grad_();

  std::vector<NamedTensor> parameters() const { return {{"w1", w1}, {"b1", b1}, {"w2", w2}}; }
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
    order_.push_back(index);
  }

  void begin() {
    sums_.assign(like_.size(), {});
    order_.clear();
  }
  const at::Tensor& operator[](std::size_t index) const { return sums_[index]; }
  const std::vector<std::size_t>& order() const { return order_; }

 private:
  std::vector<at::Tensor> like_, sums_;
  std::vector<std::size_t> order_;
};

// All tests share one network.
struct Hooked {
  Network network;
  std::vector<at::Tensor> parameters{network.w1, network.b1, network.w2};
  Sums sums{parameters};
  GradientHooks hooks{parameters, sums};

  void begin() {
    sums.begin();
    hooks.begin();
  }
  void backward(const at::Tensor& loss) {
    hooks.begin_backward();
    loss.backward();
    hooks.end_backward();
  }
};

class GradientHooksTest : public testing::Test {
 protected:
  static Hooked& hooked() {
    static Hooked instance;
    return instance;
  }
  void SetUp() override { hooked().begin(); }

  /// The gradients of plain autograd, summed over `inputs`.
  static std::vector<at::Tensor> expected(const std::vector<at::Tensor>& inputs) {
    Network plain;
    plain.w1.set_data(hooked().network.w1.detach().clone());
    plain.b1.set_data(hooked().network.b1.detach().clone());
    plain.w2.set_data(hooked().network.w2.detach().clone());
    for (const auto& x : inputs) plain.loss(x).backward();
    return {plain.w1.grad(), plain.b1.grad(), plain.w2.grad()};
  }
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

TEST_F(GradientHooksTest, TheSinkHasTheGradientAndTheParameterNone) {
  const auto x = at::randn({3, width});
  hooked().backward(hooked().network.loss(x));
  const auto gradients = expected({x});
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(hooked().sums[i].equal(gradients[i])) << i;
    EXPECT_FALSE(hooked().parameters[i].grad().defined());
  }
  EXPECT_EQ(hooked().sums.order().front(), 2u) << "backward meets the last weight first";
}

TEST_F(GradientHooksTest, WhatForwardLeavesInGradCountsUnlessItDropsIt) {
  const auto x = at::randn({3, width}), y = at::randn({5, width});
  auto& [network, parameters, sums, hooks] = hooked();
  hooks.begin_micro_batch();
  network.loss(x).backward();
  for (const auto& parameter : parameters) parameter.mutable_grad().reset();
  hooked().backward(network.loss(y));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(sums[i].equal(expected({y})[i])) << i;
  hooked().begin();
  hooks.begin_micro_batch();
  network.w1.pow(2).sum().backward();  // The loss does not depend on it.
  hooked().backward(network.w2.pow(2).sum());
  EXPECT_TRUE(sums[0].equal(at::mul(network.w1.detach(), 2)));
  EXPECT_TRUE(sums[2].equal(at::mul(network.w2.detach(), 2)));
}

TEST_F(GradientHooksTest, AGradientThatAHookKeepsStaysAsItWas) {
  const auto x = at::randn({3, width});
  at::Tensor kept;
  const auto hook = hooked().network.w2.register_hook([&](const at::Tensor& gradient) { kept = gradient; });
  hooked().backward(hooked().network.loss(x));
  const auto before = kept.clone();
  hooked().network.w2.remove_hook(hook);
  EXPECT_TRUE(hooked().sums[2].equal(before));
  const auto y = at::randn({3, width});
  hooked().begin();
  hooked().backward(hooked().network.loss(y));
  EXPECT_TRUE(hooked().sums[2].equal(expected({y})[2]));
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
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(hooked().network.w1);
  auto ours = std::exchange(hook, std::make_unique<Note>(seen));
  hooked().backward(hooked().network.loss(x));
  hooked().backward(hooked().network.loss(y));
  hooked().hooks.finish();
  hook = std::move(ours);
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen[0].equal(expected({x})[0]));
  EXPECT_TRUE(seen[1].equal(expected({x, y})[0]));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(hooked().sums[i].equal(expected({x, y})[i])) << i;
  EXPECT_FALSE(hooked().network.w1.grad().defined());
}

TEST_F(GradientHooksTest, WhatAnAttemptLeftThatWasGivenUpIsGone) {
  const auto x = at::randn({3, width});
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(hooked().network.w1);
  auto ours = std::exchange(hook, nullptr);
  hooked().backward(hooked().network.loss(x));
  hooked().begin();
  hooked().backward(hooked().network.loss(x));
  hooked().hooks.finish();
  hook = std::move(ours);
  EXPECT_TRUE(hooked().sums[0].equal(expected({x})[0]));
}

}  // namespace
}  // namespace accelmgr::libtorch
