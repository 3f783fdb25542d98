#include "libtorch/tensor/generator.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

namespace accelmgr::tensor {
namespace {

/// The generators of a process on a device; another generator of the CPU stands for that of the device.
class Generators : public testing::Test {
 protected:
  std::uint64_t draw(std::size_t i) {
    auto& generator = both_[i];
    const std::lock_guard lock(generator.mutex());
    return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
  }
  std::span<at::Generator> on_cpu() { return std::span(both_).first(1); }

  std::vector<at::Generator> both_{at::detail::getDefaultCPUGenerator(),
                                   at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{1})};
  std::vector<std::byte> state_ = std::vector<std::byte>(20'000);
};

TEST_F(Generators, GoOnWhereTheyWere) {
  seed_generators(both_, 5);
  EXPECT_EQ(draw(0), draw(1));
  draw(1);
  store_generators(both_, state_);
  const auto first = draw(0), second = draw(1);
  EXPECT_NE(first, second);
  seed_generators(both_, 6);
  load_generators(both_, state_);
  EXPECT_EQ(draw(0), first);
  EXPECT_EQ(draw(1), second);
}

TEST_F(Generators, OfADeviceKeepTheirSeedIfTheRunWasOnTheCpu) {
  seed_generators(both_, 5);
  store_generator(state_);
  const auto first = draw(0);
  seed_generators(both_, 6);
  const auto second = draw(1);
  seed_generators(both_, 6);
  load_generators(both_, state_);
  EXPECT_EQ(draw(0), first);
  EXPECT_EQ(draw(1), second);
}

TEST_F(Generators, OfTheCpuGoOnIfTheRunWasOnADevice) {
  seed_generators(both_, 5);
  store_generators(both_, state_);
  const auto first = draw(0);
  load_generator(state_);
  EXPECT_EQ(draw(0), first);
  EXPECT_EQ(default_generators(at::kCPU).size(), 1u);
}

}  // namespace
}  // namespace accelmgr::tensor
