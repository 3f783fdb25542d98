#include "runner/gradients.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "accelmgr/errors.hpp"

namespace accelmgr::runner {
namespace {

constexpr std::size_t first = 300, second = 5;  // Elements. The first tensor ends within a cache line.

class GradientsTest : public testing::Test {
 protected:
  static session::Manifest make_manifest() {
    session::Manifest manifest;
    manifest.tensors.push_back({.name = "first", .aliases = {}, .shape = {first}, .count = first});
    manifest.tensors.push_back({.name = "second", .aliases = {}, .shape = {second}, .count = second});
    return manifest;
  }
  session::Session make_session(session::SlabElement slab = session::SlabElement::same) {
    session::Extent extent{.ranks = 1, .slab_element = slab};
    extent.elements = manifest.place_tensors(extent.element);
    extent.tensors = manifest.tensors.size();
    extent.manifest_bytes = session::manifest_bytes(manifest);
    return session::Session::create(extent, extent.ranks, 1);
  }
  std::vector<float> slab(std::size_t index) const {
    const auto& entry = manifest.tensors[index];
    const auto* begin = reinterpret_cast<const float*>(session.slab(0)) + entry.first;
    return {begin, begin + entry.count};
  }
  std::uint64_t tag(std::size_t index) const { return session.tags(0)[index].load(); }

  session::Manifest manifest = make_manifest();
  session::Session session = make_session();
  Gradients gradients{{session, 0}, manifest};
};

TEST_F(GradientsTest, TheFirstOfAnAttemptIsCopiedAndLaterOnesAreAdded) {
  const std::vector<float> ones(first, 1), twos(first, 2);
  gradients.begin(1);
  gradients.capture(0, ones.data());
  EXPECT_EQ(slab(0), ones);
  gradients.capture(0, ones.data());
  EXPECT_EQ(slab(0), twos);
  gradients.begin(2);
  gradients.capture(0, ones.data());
  EXPECT_EQ(slab(0), ones) << "what an earlier attempt left is overwritten";
  EXPECT_EQ(tag(0), 2u);
  EXPECT_NE(tag(1), 2u) << "the second parameter was not used";
}

TEST_F(GradientsTest, NothingIsKeptOfTheMemoryThatWasHandedOver) {
  std::vector<float> gradient(second, 3);
  gradients.begin(1);
  gradients.capture(1, gradient.data());
  std::ranges::fill(gradient, 4.0F);
  EXPECT_EQ(slab(1), std::vector<float>(second, 3));
}

TEST_F(GradientsTest, WhatIsNotFiniteIsNamedOnceInTheOrderInWhichItCame) {
  std::vector<float> one(first, 1), other(second, 1);
  one[first - 1] = std::numeric_limits<float>::infinity();
  other[0] = std::numeric_limits<float>::quiet_NaN();
  gradients.begin(1);
  gradients.capture(1, other.data());
  gradients.capture(0, one.data());
  gradients.capture(1, other.data());
  EXPECT_EQ(gradients.nonfinite(), (std::vector<std::string>{"second", "first"}));
  gradients.begin(2);
  EXPECT_EQ(gradients.nonfinite(), std::vector<std::string>{});
}

TEST_F(GradientsTest, AParameterThatThereIsNotIsRefused) {
  const std::vector<float> gradient(second, 1);
  gradients.begin(1);
  EXPECT_THROW(gradients.capture(2, gradient.data()), ModelError);
}

TEST_F(GradientsTest, WhatADeviceWroteToItsPlaceCountsAsCaptured) {
  const std::vector<float> ones(first, 1);
  ASSERT_GE(gradients.place_of(0), gradients.slab().data());
  ASSERT_LE(gradients.place_of(1) + second * sizeof(float),
            gradients.slab().data() + gradients.slab().size());
  gradients.begin(1);
  std::memcpy(gradients.place_of(0), ones.data(), first * sizeof(float));
  gradients.arrived(0);
  EXPECT_EQ(slab(0), ones);
  EXPECT_EQ(tag(0), 1u);
  EXPECT_NE(tag(1), 1u);
  EXPECT_EQ(gradients.nonfinite(), std::vector<std::string>{});
}

TEST_F(GradientsTest, WhatArrivesAndIsNotFiniteIsNamed) {
  std::vector<float> gradient(second, 1);
  gradient[second - 1] = std::numeric_limits<float>::quiet_NaN();
  gradients.begin(1);
  std::memcpy(gradients.place_of(1), gradient.data(), second * sizeof(float));
  gradients.arrived(1);
  EXPECT_EQ(gradients.nonfinite(), std::vector<std::string>{"second"});
}

TEST_F(GradientsTest, AGradientArrivesOnceInAnAttempt) {
  gradients.begin(1);
  gradients.arrived(1);
  EXPECT_THROW(gradients.arrived(1), ModelError);
  EXPECT_THROW(gradients.arrived(2), ModelError) << "there is no such parameter";
  gradients.begin(2);
  gradients.arrived(1);
  EXPECT_EQ(tag(1), 2u);
}

TEST_F(GradientsTest, ADeviceWritesIntoNoSlabOfAnotherDtype) {
  auto narrow = make_session(session::SlabElement::bf16);
  EXPECT_TRUE(Gradients({narrow, 0}, manifest).slab().empty());
}

}  // namespace
}  // namespace accelmgr::runner
