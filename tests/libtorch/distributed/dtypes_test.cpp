// Checks every reduction on every dtype of torch: the result is right, or the dtype is refused.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "accelmgr/distributed.hpp"
#include "launcher/distributed/ranks.hpp"

namespace accelmgr::distributed {
namespace {

constexpr int ranks = 3;

const std::vector<std::string> operations{"SUM", "AVG", "PRODUCT", "MIN", "MAX", "AND", "OR"};
const std::vector<at::ScalarType> supported{at::kByte,   at::kChar,         at::kUInt16,       at::kShort,
                                            at::kUInt32, at::kInt,          at::kUInt64,       at::kLong,
                                            at::kHalf,   at::kBFloat16,     at::kFloat,        at::kDouble,
                                            at::kBool,   at::kComplexFloat, at::kComplexDouble};

bool makes_sense(at::ScalarType type, const std::string& op) {
  if (op == "AVG") return !at::isIntegralType(type, /*includeBool=*/true);
  if (op == "MIN" || op == "MAX") return !at::isComplexType(type);
  if (op == "AND" || op == "OR") return at::isIntegralType(type, /*includeBool=*/true);
  return true;
}

/// Values so small that sums and products are exact in every dtype. Sums are multiples of 3.
std::vector<int> values_of(int rank) { return {3 + 3 * rank, 6 - 3 * rank, rank % 2, 0, 1, 3}; }

int reduce(const std::string& op, int a, int b) {
  if (op == "SUM" || op == "AVG") return a + b;
  if (op == "PRODUCT") return a * b;
  if (op == "MIN") return std::min(a, b);
  if (op == "MAX") return std::max(a, b);
  return op == "AND" ? a & b : a | b;
}

std::vector<int> expected_values(at::ScalarType type, const std::string& op) {
  const auto of_type = [type](std::vector<int> values) {
    if (type == at::kBool)
      for (auto& value : values) value = value != 0;
    return values;
  };
  auto result = of_type(values_of(0));
  for (int rank = 1; rank < ranks; ++rank) {
    const auto values = of_type(values_of(rank));
    for (std::size_t i = 0; i < values.size(); ++i) result[i] = reduce(op, result[i], values[i]);
  }
  return result;
}

at::Tensor tensor_of(const std::vector<int>& values, at::ScalarType type) {
  return at::tensor(values, at::kDouble).to(type);
}

TEST(DTypes, EveryReductionOfEachIsRightOrRefusedByName) {
  test::expect_on_ranks(ranks, [](int rank) {
    for (const auto type : supported)
      for (const auto& op : operations) {
        SCOPED_TRACE(fmt::format("{} of {}", op, c10::toString(type)));
        const auto in = tensor_of(values_of(rank), type);
        if (!makes_sense(type, op)) {
          EXPECT_THROW(all_reduce(in, op), UsageError);
          continue;
        }
        auto expected = at::tensor(expected_values(type, op), at::kDouble);
        if (op == "AVG") expected /= ranks;
        EXPECT_TRUE(at::equal(all_reduce(in, op), expected.to(type))) << all_reduce(in, op).to(at::kDouble);
      }
  });
}

TEST(DTypes, AllOfThemAreGatheredBroadcastAndExchanged) {
  test::expect_on_ranks(ranks, [](int rank) {
    for (const auto type : supported) {
      SCOPED_TRACE(c10::toString(type));
      std::vector<at::Tensor> all;
      for (int other = 0; other < ranks; ++other)
        all.push_back(tensor_of(values_of(other), type).to(at::kComplexDouble));
      const auto mine = tensor_of(values_of(rank), type);
      const auto same = [](const at::Tensor& a, const at::Tensor& b) {
        return at::equal(a.to(at::kComplexDouble), b);
      };
      EXPECT_TRUE(same(all_gather(mine), at::cat(all)));
      EXPECT_TRUE(same(broadcast(mine, 1), all[1]));
      EXPECT_TRUE(same(broadcast(rank == 2 ? mine : at::Tensor(), 2, /*safe_mode=*/true), all[2]));
      const auto exchanged = all_to_all(mine);
      EXPECT_EQ(exchanged.scalar_type(), type);
      for (int other = 0; other < ranks; ++other)
        EXPECT_TRUE(same(exchanged.narrow(0, 2 * other, 2),
                         all[static_cast<std::size_t>(other)].narrow(0, 2 * rank, 2)));
    }
  });
}

}  // namespace
}  // namespace accelmgr::distributed
