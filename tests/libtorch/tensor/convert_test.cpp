#include "libtorch/tensor/convert.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <array>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"
#include "refusal.hpp"

namespace accelmgr::tensor {
namespace {

at::Tensor parameter() { return at::ones({2, 3}).requires_grad_(); }

TEST(Convert, EveryDtypeIsTorchsOfTheSameNameAndSize) {
  for (std::size_t number = 0; number < dtype_count; ++number) {
    const auto dtype = static_cast<DType>(number);
    const auto type = scalar_type(dtype);
    EXPECT_EQ(dtype_of(type), dtype);
    EXPECT_EQ(c10::elementSize(type), size_of(dtype));
    EXPECT_EQ(c10::getDtypeNames(type).first, name_of(dtype));
  }
}

TEST(Convert, ADtypeThatOursAreNotIsNamed) { EXPECT_THROW(dtype_of(at::kQInt8), ModelError); }

TEST(Convert, AViewIsTheMemory) {
  std::array<float, 6> memory{0, 1, 2, 3, 4, 5};
  const std::int64_t shape[] = {3, 2}, strides[] = {1, 3};
  auto tensor = view(reinterpret_cast<std::byte*>(memory.data()), DType::float32, shape, strides);
  EXPECT_EQ(tensor[2][1].item().toFloat(), 5);
  tensor[0][1].fill_(9);
  EXPECT_EQ(memory[3], 9);
}

TEST(Convert, ADescriptionHasAllNamesAndOneIdentityForEachTensor) {
  const auto tied = parameter();
  const auto description = describe({{"one", tied}, {"two", parameter()}, {"three", tied}},
                                    {{"scratch", at::ones({2})}, {"none", at::Tensor()}}, {"scratch"});
  ASSERT_EQ(description.parameters.size(), 3u);
  EXPECT_EQ(description.parameters[0].identity, description.parameters[2].identity);
  EXPECT_NE(description.parameters[0].identity, description.parameters[1].identity);
  ASSERT_EQ(description.buffers.size(), 1u);
  EXPECT_FALSE(description.buffers[0].persistent);
  EXPECT_EQ(without_repetitions({{"one", tied}, {"three", tied}}).size(), 1u);
}

TEST(Convert, WhatCannotBeDescribedIsRefusedByName) {
  const auto refused = [](const NamedTensor& tensor) {
    return test::message_of<ModelError>([&] { describe({tensor}, {}); });
  };
  EXPECT_TRUE(test::says(refused({"product", parameter().mul(2)}), {"'product' is computed"}));
  EXPECT_TRUE(test::says(refused({"nothing", at::Tensor()}), {"'nothing' is undefined"}));
  EXPECT_TRUE(test::says(refused({"elsewhere", at::empty({2}, at::TensorOptions().device(at::kMeta))}),
                         {"'elsewhere' is on meta"}));
  EXPECT_TRUE(test::says(refused({"sparse", at::ones({2}).to_sparse()}), {"'sparse' is sparse"}));
}

}  // namespace
}  // namespace accelmgr::tensor
