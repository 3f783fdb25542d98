#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "accelmgr/distributed.hpp"
#include "launcher/distributed/ranks.hpp"
#include "message_of.hpp"

namespace accelmgr::distributed {
namespace {

using test::expect_on_ranks;
using test::message_of;
using test::mismatched;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class Collectives : public testing::TestWithParam<int> {
 protected:
  static int size() { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, testing::Values(1, 2, 3), testing::PrintToStringParamName());

/// 0, 1, 2, ... plus 100 times the rank.
at::Tensor numbers(at::IntArrayRef shape, int rank, at::ScalarType type = at::kFloat) {
  return (at::arange(c10::multiply_integers(shape), at::kDouble) + 100 * rank).reshape(shape).to(type);
}

at::Tensor sum_of_numbers(at::IntArrayRef shape, int ranks, at::ScalarType type = at::kFloat) {
  auto sum = at::zeros(shape, type);
  for (int rank = 0; rank < ranks; ++rank) sum += numbers(shape, rank, type);
  return sum;
}

void expect_equal(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_TRUE(at::equal(actual, expected));
}

TEST_P(Collectives, AllReduceOfTensorsOfEveryForm) {
  expect_on_ranks(size(), [](int rank) {
    for (const auto& shape :
         std::vector<std::vector<std::int64_t>>{{}, {1}, {0}, {3, 0, 2}, {2, 3, 4}, {100'000}})
      expect_equal(all_reduce(numbers(shape, rank)), sum_of_numbers(shape, size()));
    const auto sum = sum_of_numbers({6, 4}, size());
    const auto whole = numbers({6, 4}, rank);
    expect_equal(all_reduce(whole.t()), sum.t().contiguous());
    expect_equal(all_reduce(whole.slice(0, 0, 6, 2)), sum.slice(0, 0, 6, 2).contiguous());
    expect_equal(all_reduce(whole.slice(0, 1, 2).expand({5, 4})),
                 sum.slice(0, 1, 2).expand({5, 4}).contiguous());
    // The input has not changed.
    expect_equal(whole, numbers({6, 4}, rank));
  });
}

TEST_P(Collectives, AllReduceInPlaceNeedsNoOtherMemory) {
  expect_on_ranks(size(), [](int rank) {
    const auto tensor = numbers({6, 4}, rank).requires_grad_();
    const auto* before = tensor.const_data_ptr();
    EXPECT_TRUE(all_reduce_(tensor).is_same(tensor));
    EXPECT_EQ(tensor.const_data_ptr(), before);
    expect_equal(tensor.detach(), sum_of_numbers({6, 4}, size()));
    const auto whole = numbers({6, 4}, rank);
    all_reduce_(whole.t());
    expect_equal(whole, sum_of_numbers({6, 4}, size()));
  });
}

TEST_P(Collectives, AllGatherConcatenates) {
  expect_on_ranks(size(), [](int rank) {
    for (const auto& shape : std::vector<std::vector<std::int64_t>>{{2, 3}, {1}, {0, 3}, {4}}) {
      std::vector<at::Tensor> all;
      auto whole = shape;
      whole[0] *= size();
      const auto gathered = all_gather(numbers(shape, rank));
      ASSERT_EQ(gathered.sizes(), whole);
      for (int other = 0; other < size(); ++other)
        expect_equal(gathered.narrow(0, other * shape[0], shape[0]), numbers(shape, other));
    }
    if (size() > 1) {
      const auto of_0_d = all_gather(numbers({}, rank));
      EXPECT_EQ(of_0_d.sizes(), (std::vector<std::int64_t>{size()}));
      expect_equal(of_0_d, at::arange(size(), at::kFloat) * 100);
    }
    expect_equal(all_gather(rank + 0.5), at::arange(size(), at::kDouble) + 0.5);
    expect_equal(all_gather(numbers({4, 3}, rank).t()).narrow(0, 3 * rank, 3),
                 numbers({4, 3}, rank).t().contiguous());
  });
}

TEST_P(Collectives, ReduceScatterKeepsTheOwnBlock) {
  expect_on_ranks(size(), [](int rank) {
    const std::vector<std::int64_t> shape{2 * size(), 3};
    expect_equal(reduce_scatter(numbers(shape, rank)), sum_of_numbers(shape, size()).narrow(0, 2 * rank, 2));
    expect_equal(reduce_scatter(numbers(shape, rank), "MAX"),
                 numbers(shape, size() - 1).narrow(0, 2 * rank, 2));
  });
}

TEST_P(Collectives, AllToAllExchangesBlocks) {
  expect_on_ranks(size(), [](int rank) {
    const auto out = all_to_all(numbers({2 * size(), 3}, rank));
    for (int other = 0; other < size(); ++other)
      expect_equal(out.narrow(0, 2 * other, 2), numbers({2 * size(), 3}, other).narrow(0, 2 * rank, 2));
    expect_equal(all_to_all(numbers({0, 3}, rank)), at::zeros({0, 3}));
  });
}

TEST_P(Collectives, ResultsDoNotRequireGradients) {
  expect_on_ranks(size(), [](int rank) {
    if (size() == 1) return;
    const auto tensor = numbers({size(), 2}, rank).requires_grad_(true);
    for (const auto& result :
         {all_reduce(tensor), all_gather(tensor), broadcast(tensor), reduce_scatter(tensor)})
      EXPECT_FALSE(result.requires_grad());
    EXPECT_TRUE(tensor.requires_grad());
  });
}

TEST(Collective, UnequalShapesAreNamedOnEveryRank) {
  expect_on_ranks(3, [](int rank) {
    const auto tensor = rank == 1 ? at::ones({2, 5}) : at::ones({2, 3});
    const auto names_both = AllOf(HasSubstr("[2, 3]"), HasSubstr("[2, 5]"));
    EXPECT_THAT(message_of<CollectiveError>([&] { all_gather(tensor); }), names_both);
    EXPECT_THAT(mismatched([&] { all_reduce(tensor); }), ElementsAre(1));
    EXPECT_THAT(mismatched([&] { broadcast(tensor); }), ElementsAre(1));
    // 2 is no multiple of 3 ranks, but all ranks are first told that their shapes differ.
    EXPECT_THAT(mismatched([&] { all_to_all(tensor); }), ElementsAre(1));
    EXPECT_THAT(mismatched([&] { reduce_scatter(at::ones({rank == 1 ? 3 : 2})); }), ElementsAre(1));
    EXPECT_THAT(mismatched([&] { all_reduce(at::ones({2}), rank == 1 ? "SUM" : "MAX"); }), ElementsAre(1));
    EXPECT_THAT(mismatched([&] { all_reduce(at::ones({2}, rank == 1 ? at::kFloat : at::kLong)); }),
                ElementsAre(1));
    // The communicator still works.
    EXPECT_EQ(all_reduce(1.0), 3.0);
  });
}

TEST(Collective, BlocksThatDoNotComeOutEvenAreRefused) {
  expect_on_ranks(2, [](int) {
    EXPECT_THROW(all_to_all(at::ones({3, 2})), UsageError);
    EXPECT_THROW(reduce_scatter(at::ones({5})), UsageError);
    EXPECT_THROW(reduce_scatter(at::ones({})), UsageError);
  });
}

TEST(Collective, WhatIsNoDenseTensorOfTheHostIsRefusedByName) {
  expect_on_ranks(2, [](int) {
    EXPECT_THAT(message_of<UsageError>([] { all_reduce(at::Tensor()); }), HasSubstr("undefined"));
    EXPECT_THAT(message_of<UsageError>([] { all_reduce(at::ones({2}).to_sparse()); }),
                AllOf(HasSubstr("all_reduce"), HasSubstr("Sparse")));
    EXPECT_THAT(message_of<UsageError>(
                    [] { all_gather(at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8)); }),
                AllOf(HasSubstr("all_gather"), HasSubstr("QInt8")));
    EXPECT_THAT(message_of<UsageError>([] { all_reduce(at::empty({2}, at::TensorOptions(at::kMeta))); }),
                AllOf(HasSubstr("meta"), HasSubstr("cpu")));
    EXPECT_THAT(message_of<UsageError>([] { all_reduce(at::ones({2}).to(at::kFloat8_e4m3fn)); }),
                HasSubstr("Float8_e4m3fn"));
    EXPECT_THROW(all_reduce(1.0, "AND"), UsageError);
  });
}

TEST(Collective, ConjugateAndNegativeViewsAreWhatTheyStandFor) {
  expect_on_ranks(2, [](int rank) {
    const auto tensor = at::full({2}, c10::complex<double>(1, rank + 1), at::kComplexDouble);
    expect_equal(all_reduce(tensor.conj()), at::full({2}, c10::complex<double>(2, -3), at::kComplexDouble));
    expect_equal(all_reduce(at::imag(tensor.conj())), at::full({2}, -3.0, at::kDouble));
  });
}

}  // namespace
}  // namespace accelmgr::distributed
