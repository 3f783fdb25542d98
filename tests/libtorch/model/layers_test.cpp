#include "libtorch/model/layers.hpp"

#include <ATen/ops/linear.h>

#include "libtorch/model/linear.hpp"
#include "libtorch/model/support.hpp"

namespace accelmgr::test {
namespace {

struct Product {
  std::int64_t rows, in, out;
  bool bias = true;
};

void PrintTo(const Product& p, std::ostream* out) {
  *out << p.rows << "x" << p.in << "x" << p.out << (p.bias ? "" : ", no bias");
}

class LinearLayer : public testing::TestWithParam<Product> {};

TEST_P(LinearLayer, AgreesWithTorchInValueAndGradients) {
  const auto [rows, in, out, with_bias] = GetParam();
  seed(3);
  std::vector<at::Tensor> ours{at::randn({rows, in}), at::randn({out, in})}, theirs;
  if (with_bias) ours.push_back(at::randn({out}));
  for (auto& tensor : ours) theirs.push_back(tensor.to(at::kDouble).set_requires_grad(true));
  for (auto& tensor : ours) tensor.set_requires_grad(true);
  const auto bias = [&](const auto& tensors) { return with_bias ? std::optional(tensors[2]) : std::nullopt; };

  const auto value = model::linear(ours[0], ours[1], bias(ours));
  const auto expected = at::linear(theirs[0], theirs[1], bias(theirs));
  EXPECT_LT(value.to(at::kDouble).sub(expected).norm().item().toDouble(),
            1e-6 * expected.norm().item().toDouble());
  const auto gradient = at::randn({rows, out});
  value.backward(gradient);
  expected.backward(gradient.to(at::kDouble));
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const auto difference = ours[i].grad().to(at::kDouble).sub(theirs[i].grad()).norm().item().toDouble();
    EXPECT_LT(difference, 1e-6 * theirs[i].grad().norm().item().toDouble()) << "input " << i;
    EXPECT_TRUE(ours[i].grad().is_contiguous()) << "input " << i;
  }
}

// Small products go to MKL, large ones to oneDNN. Wide outputs take the other path to the weight's
// gradient.
INSTANTIATE_TEST_SUITE_P(Shapes, LinearLayer,
                         testing::Values(Product{4, 6, 8}, Product{64, 256, 256}, Product{512, 64, 256},
                                         Product{512, 256, 64}, Product{512, 64, 256, false}));

TEST(LinearLayer, GivesNoGradientToWhatRequiresNone) {
  const auto x = at::randn({64, 256}), weight = at::randn({256, 256}).set_requires_grad(true);
  const auto bias = at::randn({256});
  model::linear(x, weight, bias).sum().backward();
  EXPECT_TRUE(weight.grad().defined());
  EXPECT_FALSE(x.grad().defined() || bias.grad().defined());
}

TEST(DropoutMask, DropsTheGivenShareAndKeepsTheMean) {
  seed(5);
  for (const double rate : {0.1, 0.5}) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const auto mask = model::dropout_mask({1000, 333}, rate, dtype);
      EXPECT_EQ(mask.scalar_type(), dtype);
      EXPECT_NEAR(mask.eq(0).to(at::kDouble).mean().item().toDouble(), rate, 0.003);
      const auto kept = mask.masked_select(mask.ne(0));
      EXPECT_NEAR(kept.min().item().toDouble(), 1 / (1 - rate), 1e-6);
      EXPECT_EQ(kept.min().item().toDouble(), kept.max().item().toDouble());
    }
  }
}

TEST(DropoutMask, HasNoPatternAlongItsElements) {
  seed(9);
  const auto mask = model::dropout_mask({1 << 16}, 0.5, at::kFloat).sub(1);
  for (const std::int64_t lag : {1, 2, 15, 16, 17, 32, 128}) {
    const auto products = mask.narrow(0, 0, mask.size(0) - lag).mul(mask.narrow(0, lag, mask.size(0) - lag));
    EXPECT_NEAR(products.mean().item().toDouble(), 0, 0.02) << "lag " << lag;
  }
}

TEST(AddDropped, WithoutDropoutIsTheSumAndOtherwiseDropsTheBranchAlone) {
  seed(1);
  const auto residual = at::randn({50, 40}), branch = at::randn({50, 40});
  EXPECT_TRUE(model::add_dropped(residual, branch, 0).equal(residual.add(branch)));
  const auto added = model::add_dropped(residual, branch, 0.25).sub(residual);
  const auto is_dropped = added.abs().lt(1e-6), is_scaled = added.sub(branch.div(0.75)).abs().lt(1e-5);
  EXPECT_TRUE(is_dropped.logical_or(is_scaled).all().item().toBool());
  EXPECT_TRUE(is_dropped.any().item().toBool());
}

}  // namespace
}  // namespace accelmgr::test
