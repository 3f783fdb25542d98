#include "engine/runner/gradients.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "accelmgr/errors.hpp"
#include "elements.hpp"
#include "engine/session/session_support.hpp"
#include "message_of.hpp"

namespace accelmgr::runner {
namespace {

constexpr std::size_t first = 300, second = 5;  // Elements. The first tensor ends within a cache line.

class GradientsTest : public testing::Test {
 protected:
  static session::Manifest make_manifest() {
    session::Manifest manifest;
    for (const auto& [count, name] : {std::pair{first, "first"}, {second, "second"}})
      manifest.tensors.push_back(session::tensor_of(count, DType::float32, session::Group::decay, name));
    return manifest;
  }
  std::vector<float> slab(std::size_t index) const {
    const auto& entry = manifest.tensors[index];
    const auto* begin = reinterpret_cast<const float*>(session.slab(0) + entry.slab);
    return {begin, begin + entry.count};
  }
  void arrived(std::initializer_list<std::size_t> indices) {
    gradients.arrived({indices.begin(), indices.size()});
  }
  std::uint64_t tag(std::size_t index) const { return session.tags(0)[index].load(); }

  session::Manifest manifest = make_manifest();
  session::Session session = session::session_of(manifest, 1);
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

// A device looks for Inf and NaN where the gradient is: gigabytes are not read again here.
TEST_F(GradientsTest, WhatADeviceWroteToItsPlaceCountsAsCapturedAndIsFiniteUnlessItSaysOtherwise) {
  const std::vector<float> ones(first, 1), broken(second, std::numeric_limits<float>::quiet_NaN());
  ASSERT_GE(gradients.place_of(0), gradients.slab().data());
  ASSERT_LE(gradients.place_of(1) + second * sizeof(float),
            gradients.slab().data() + gradients.slab().size());
  gradients.begin(1);
  std::memcpy(gradients.place_of(0), ones.data(), first * sizeof(float));
  std::memcpy(gradients.place_of(1), broken.data(), second * sizeof(float));
  arrived({0});
  EXPECT_EQ(slab(0), ones);
  EXPECT_EQ(tag(0), 1u);
  EXPECT_NE(tag(1), 1u);
  arrived({1});
  EXPECT_EQ(gradients.nonfinite(), std::vector<std::string>{});
  gradients.note(0, std::numeric_limits<double>::infinity());
  EXPECT_EQ(gradients.nonfinite(), std::vector<std::string>{"first"});
  EXPECT_THROW(gradients.note(2, std::numeric_limits<double>::infinity()), ModelError)
      << "there is no such parameter";
}

TEST_F(GradientsTest, AGradientArrivesOnceInAnAttempt) {
  gradients.begin(1);
  arrived({1});
  EXPECT_THROW(arrived({1}), ModelError);
  EXPECT_THROW(arrived({0, 2}), ModelError) << "there is no such parameter";
  gradients.begin(2);
  arrived({1});
  EXPECT_EQ(tag(1), 2u);
}

/// A session with parameters of all dtypes.
class MixedGradientsTest : public GradientsTest {
 protected:
  MixedGradientsTest() {
    manifest = test::mixed_manifest({300, 5000, 17});
    session = session::session_of(manifest, 1);
  }
  Gradients mixed() { return {{session, 0}, manifest}; }
  test::Elements in_slab(std::size_t index) {
    const auto& entry = manifest.tensors[index];
    return {session.slab(0) + entry.slab, entry.types.slab, entry.elements()};
  }
};

TEST_F(MixedGradientsTest, AreCopiedAndAddedInTheirDtype) {
  auto all = mixed();
  all.begin(1);
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
    const auto& entry = manifest.tensors[i];
    if (entry.group == session::Group::frozen) continue;
    std::vector<std::byte> gradient(entry.slab_bytes());
    const test::Elements elements(gradient.data(), entry.types.gradient, entry.elements());
    elements.fill(3);
    all.capture(i, gradient.data());
    elements.fill(4);
    all.capture(i, gradient.data());
    EXPECT_EQ(in_slab(i).numbers(), std::vector<double>(entry.elements(), 7)) << i;
  }
  EXPECT_FALSE(all.slab().empty());
  EXPECT_EQ(all.nonfinite(), std::vector<std::string>{});
}

TEST_F(MixedGradientsTest, AreOfTheParametersThatAreTrainedNow) {
  const std::vector<std::byte> gradient(manifest.tensors[test::to_unfreeze].slab_bytes() +
                                        manifest.tensors[3].bytes());
  const auto refusal_of = [&](std::size_t index) {
    return test::message_of<ModelError>([&] { mixed().capture(index, gradient.data()); });
  };
  EXPECT_EQ(refusal_of(3), "a gradient was passed for parameter 'p3', which is int8 and cannot be trained");
  EXPECT_NE(refusal_of(test::to_unfreeze).find("the parameter is frozen"), std::string::npos);
  EXPECT_NE(refusal_of(manifest.tensors.size()), "") << "there is no such parameter";

  EXPECT_TRUE(mixed().is_trained(0));
  EXPECT_FALSE(mixed().is_trained(test::to_unfreeze));
  session.unfrozen()[test::to_unfreeze].store(1);
  EXPECT_TRUE(mixed().is_trained(test::to_unfreeze));
}

// A shard may begin and end within tensors, and what is not finite is named.
TEST_F(MixedGradientsTest, OfAShardComeToTheirPlacesAndAreTagged) {
  auto all = mixed();
  const session::ShardPlan plan(manifest);
  std::vector<std::byte> sums(plan.bytes());
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i)
    if (const auto& entry = manifest.tensors[i]; entry.has_room())
      test::Elements(&sums[plan.place(i)], entry.types.gradient, entry.elements()).fill(double(i) + 1);
  test::Elements(&sums[plan.place(7)], session::Element::f64, 1).set(0, HUGE_VAL);
  session.unfrozen()[test::to_unfreeze].store(1);
  all.begin(1);
  for (std::uint64_t at = 0; at < sums.size(); at += 192) {
    const session::Bytes shard{at, std::min<std::uint64_t>(at + 192, sums.size())};
    all.shard(shard, &sums[at]);
    for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
      const auto each = session::bytes_of(manifest.tensors[i].types.gradient);
      const session::Bytes tensor{plan.place(i), plan.place(i) + manifest.tensors[i].elements() * each};
      if (!all.is_trained(i) || tensor.first >= shard.end || tensor.end <= shard.first) continue;
      const auto& told = session.tags(0)[i];
      EXPECT_EQ(told.first() * each, std::max(shard.first, tensor.first) - tensor.first) << i;
      EXPECT_EQ(told.end(),
                tensor.end <= shard.end ? session::Tag::to_the_end : (shard.end - tensor.first) / each)
          << i;
    }
  }
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
    EXPECT_EQ(tag(i) == 1, all.is_trained(i)) << i;
    if (all.is_trained(i)) {
      EXPECT_EQ(in_slab(i)[manifest.tensors[i].elements() - 1], double(i) + 1) << i;
    }
  }
  EXPECT_EQ(all.nonfinite(), std::vector<std::string>{"p7"});
  EXPECT_THROW(all.shard({64, sums.size() + 64}, sums.data()), ModelError);
}

}  // namespace
}  // namespace accelmgr::runner
