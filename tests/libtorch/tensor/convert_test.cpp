#include "libtorch/tensor/convert.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <array>

#include "accelmgr/errors.hpp"

namespace accelmgr::tensor {
namespace {

at::Tensor parameter() { return at::ones({2, 3}).requires_grad_(); }

std::string message_of(const std::vector<NamedTensor>& parameters,
                       const std::vector<NamedTensor>& buffers = {}) {
  try {
    describe(parameters, buffers);
  } catch (const ModelError& error) {
    return error.what();
  }
  return {};
}

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
  EXPECT_NE(message_of({{"product", parameter().mul(2)}}).find("'product' is computed"), std::string::npos);
  EXPECT_NE(message_of({{"nothing", at::Tensor()}}).find("'nothing' is undefined"), std::string::npos);
  const auto elsewhere = at::empty({2}, at::TensorOptions().device(at::kMeta));
  EXPECT_NE(message_of({{"elsewhere", elsewhere}}).find("'elsewhere' is on meta"), std::string::npos);
  EXPECT_NE(message_of({{"weight", parameter()}}, {{"sparse", at::ones({2}).to_sparse()}})
                .find("buffer 'sparse' is sparse"),
            std::string::npos);
}

}  // namespace
}  // namespace accelmgr::tensor
