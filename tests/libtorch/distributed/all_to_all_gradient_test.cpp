// Compares the backward pass of all_to_all with the chain rule: the exchange is linear and its own transpose.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "accelmgr/distributed.hpp"
#include "launcher/distributed/ranks.hpp"

namespace accelmgr::distributed {
namespace {

/// The loss is not linear in x and differs between ranks.
void expect_gradient(const GroupArgument& group, std::int64_t size) {
  const auto values = (at::arange(size * 6, at::kDouble).reshape({2 * size, 3}) * 0.37 + get_rank()).cos();
  const auto weights = (at::arange(size * 6, at::kDouble).reshape({2 * size, 3}) + 1) * (get_rank() + 1);
  const auto x = values.clone().requires_grad_(true);
  (all_to_all(x * x, group).sin() * weights).sum().backward();
  const auto expected = all_to_all(all_to_all(values * values, group).cos() * weights, group) * 2 * values;
  ASSERT_TRUE(x.grad().defined());
  EXPECT_LT((x.grad() - expected).abs().max().item().toDouble(), 1e-12);
}

TEST(AllToAllGradient, IsThatOfTheDefinitionInAGroupToo) {
  for (const int size : {1, 2, 3}) test::expect_on_ranks(size, [size](int) { expect_gradient({}, size); });
  test::expect_on_ranks(3, [](int rank) {
    const auto group = new_group({0, 2});
    if (rank != 1) expect_gradient(group, 2);
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

}  // namespace
}  // namespace accelmgr::distributed
