// Compares the backward pass of all_to_all with numerical differences of the loss.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cmath>

#include "accelmgr/distributed.hpp"
#include "launcher/distributed/ranks.hpp"

namespace accelmgr::distributed {
namespace {

/// A loss that is not linear in x and differs between ranks.
at::Tensor local_loss(const at::Tensor& x, const GroupArgument& group) {
  const auto weights = (at::arange(x.numel(), at::kDouble).reshape(x.sizes()) + 1) * (get_rank() + 1);
  return (all_to_all(x * x, group).sin() * weights).sum();
}

double world_loss(const at::Tensor& x, const GroupArgument& group) {
  return all_reduce(local_loss(x, group).item().toDouble(), "SUM", group);
}

/// The derivative of the sum of all ranks' losses by this rank's x. The ranks change their elements in turn,
/// one at a time.
at::Tensor numerical_gradient(const at::Tensor& x, const GroupArgument& group,
                              const std::vector<int>& ranks) {
  constexpr double step = 1e-6;
  auto gradient = at::empty_like(x);
  for (const int rank : ranks)
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      const auto changed = [&](double by) {
        auto other = x.clone();
        if (rank == get_rank()) other.view(-1)[i] += by;
        return world_loss(other, group);
      };
      const double slope = (changed(step) - changed(-step)) / (2 * step);
      if (rank == get_rank()) gradient.view(-1)[i] = slope;
    }
  return gradient;
}

void expect_gradient(const GroupArgument& group, const std::vector<int>& ranks) {
  const auto rows = 2 * static_cast<std::int64_t>(ranks.size());
  const auto values = (at::arange(rows * 3, at::kDouble).reshape({rows, 3}) * 0.37 + get_rank() * 0.11).cos();
  const auto numerical = numerical_gradient(values, group, ranks);
  const auto x = values.clone().requires_grad_(true);
  local_loss(x, group).backward();
  ASSERT_TRUE(x.grad().defined());
  EXPECT_LT((x.grad() - numerical).abs().max().item().toDouble(), 1e-7);
}

TEST(AllToAllGradient, IsThatOfTheDefinition) {
  for (const int size : {2, 3})
    test::expect_on_ranks(size, [size](int) {
      std::vector<int> all;
      for (int rank = 0; rank < size; ++rank) all.push_back(rank);
      expect_gradient({}, all);
    });
}

TEST(AllToAllGradient, InAGroupIsThatOfTheDefinition) {
  test::expect_on_ranks(3, [](int rank) {
    const auto group = new_group({0, 2});
    if (rank != 1) expect_gradient(group, {0, 2});
  });
}

TEST(AllToAllGradient, OfAGradientIsOneToo) {
  test::expect_on_ranks(2, [](int) {
    // The loss is sum(x^3) of the received blocks. Its second derivative, 6 x, is exchanged back and forth.
    const auto x = (at::arange(4, at::kDouble) + 1 + get_rank()).requires_grad_(true);
    const auto y = all_to_all(x);
    (y * y * y).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    const auto first = x.grad().clone();
    x.mutable_grad() = at::Tensor();
    first.sum().backward();
    EXPECT_TRUE(at::equal(first.detach(), 3 * x.detach() * x.detach()));
    EXPECT_TRUE(at::equal(x.grad(), 6 * x.detach()));
  });
}

TEST(AllToAllGradient, OfASerialInputGoesThrough) {
  const auto x = at::ones({3}, at::kDouble).requires_grad_(true);
  (all_to_all(x) * 2).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::ones({3}, at::kDouble) * 2));
}

}  // namespace
}  // namespace accelmgr::distributed
