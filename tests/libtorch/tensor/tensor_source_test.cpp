#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <set>

#include "engine/data/fixtures.hpp"

namespace accelmgr::test {
namespace {

// The values of a source whose only tensor is 0 .. count-1, in the order in which they come.
std::vector<std::int64_t> numbers(BatchSource& source, std::size_t count = 1'000'000) {
  Reader reader(source);
  std::vector<std::int64_t> out;
  while (out.size() < count && reader.next()) out.push_back(reader.value<std::int64_t>(0));
  return out;
}

std::unique_ptr<BatchSource> counting(std::int64_t rows, int epochs, std::uint64_t seed) {
  return tensor_source({{"x", at::arange(rows, at::kLong)}}, epochs, seed);
}

TEST(TensorSource, GivesEveryTensorOfAnyDtypeRowByRow) {
  const at::Tensor a = at::arange(12, at::kFloat).reshape({2, 2, 3});
  const at::Tensor b = at::arange(2, at::kByte);
  const at::Tensor c = at::arange(4, at::kBFloat16).reshape({2, 2});
  const auto source = tensor_source({{"a", a}, {"b", b}, {"c", c}}, 1, 0);
  const auto fields = source->fields();
  ASSERT_EQ(fields.size(), 3U);
  EXPECT_EQ(fields[0].name, "a");
  EXPECT_EQ(fields[0].shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(fields[1].dtype, at::kByte);
  EXPECT_TRUE(fields[1].shape.empty());
  Reader reader(*source);
  for (std::int64_t row = 0; row < 2; ++row) {
    ASSERT_TRUE(reader.next());
    for (int k = 0; k < 6; ++k) EXPECT_EQ(reader.values<float>(0)[k], 6 * row + k);
    EXPECT_EQ(reader.value<std::uint8_t>(1), row);
    EXPECT_EQ(reader.values<c10::BFloat16>(2)[1], c10::BFloat16(2 * row + 1));
  }
  EXPECT_FALSE(reader.next());
}

TEST(TensorSource, EveryElementComesOnceInEachEpochInTheOrderOfTheSeed) {
  EXPECT_EQ(numbers(*counting(4, 2, 0)), (std::vector<std::int64_t>{0, 1, 2, 3, 0, 1, 2, 3}));
  const auto all = numbers(*counting(100, 3, 5));
  ASSERT_EQ(all.size(), 300U);
  std::set<std::vector<std::int64_t>> epochs;
  for (int e = 0; e < 3; ++e) {
    std::vector<std::int64_t> epoch(all.begin() + 100 * e, all.begin() + 100 * (e + 1));
    EXPECT_TRUE(epochs.insert(epoch).second) << "another order in each";
    std::sort(epoch.begin(), epoch.end());
    for (std::int64_t i = 0; i < 100; ++i) ASSERT_EQ(epoch[static_cast<std::size_t>(i)], i);
  }
  EXPECT_EQ(numbers(*counting(100, 3, 5)), all);
  EXPECT_NE(numbers(*counting(100, 3, 6)), all);
  EXPECT_EQ(numbers(*counting(3, 0, 1), 1000).size(), 1000U) << "0 epochs are endless";
}

TEST(TensorSource, TheEndStays) {
  const auto source = counting(2, 1, 0);
  EXPECT_EQ(numbers(*source).size(), 2U);
  EXPECT_EQ(numbers(*source).size(), 0U);
}

TEST(TensorSource, GoesOnFromAStateAnywhere) {
  for (const std::uint64_t seed : {0, 4}) {
    expect_states_restore([&] { return counting(6, 3, seed); }, 18);
    expect_states_restore([&] { return counting(6, 0, seed); }, 40);
  }
}

TEST(TensorSource, AStateOfOtherDataIsRefused) {
  const auto state = *counting(6, 3, 4)->state();
  EXPECT_EQ(state, "tensors seed=4 elements=6 epoch=0 position=0");
  for (const auto& source : {counting(6, 3, 5), counting(7, 3, 4)}) refusal(*source, state);
  for (const char* beyond : {"epoch=3 position=0", "epoch=0 position=7"})
    refusal(*counting(6, 3, 4), std::string("tensors seed=4 elements=6 ") + beyond);
}

TEST(TensorSource, TakesTheValuesOfViewsAndLeavesOfAutograd) {
  const at::Tensor view = at::arange(6, at::kFloat).reshape({2, 3}).t();
  const auto source = tensor_source({{"x", view}, {"w", at::zeros({3}).requires_grad_()}}, 1, 0);
  Reader reader(*source);
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.values<float>(0), (std::vector<float>{0, 3}));
}

TEST(TensorSource, WhatIsNoDataIsRefusedByName) {
  const auto refused = [](const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
    return message_of<DataError>([&] { tensor_source(tensors, 1, 0); });
  };
  expect_contains(refused({}), {"at least one tensor"});
  expect_contains(refused({{"x", at::zeros({0, 3})}}), {"'x'", "no elements"});
  expect_contains(refused({{"x", at::zeros({5, 3})}, {"y", at::zeros({4})}}), {"'y' has 4", "'x' has 5"});
  expect_contains(refused({{"x", at::zeros({1})}, {"x", at::zeros({1})}}), {"'x'", "twice"});
  expect_contains(refused({{"x", at::Tensor()}}), {"'x'", "undefined"});
  expect_contains(refused({{"x", at::zeros({})}}), {"'x'", "single number"});
  expect_contains(refused({{"x", at::zeros({3}).to_sparse()}}), {"'x'", "Sparse"});
  expect_contains(refused({{"x", at::zeros({3}, at::TensorOptions(at::kMeta))}}), {"'x'", "CPU"});
  expect_contains(refused({{"x", at::empty({3}, at::kBits8)}}), {"'x'", "Bits8"});
  expect_contains(message_of<DataError>([] { counting(3, -1, 0); }), {"epochs is -1"});
}

}  // namespace
}  // namespace accelmgr::test
