// Checks that the replicas without torch keep the contract of replica.hpp, and that their gradients agree
// with finite differences. Each test runs on a replica in the host's memory, and on one that uses the
// transport for devices.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <latch>
#include <map>
#include <optional>

#include "engine/replica/model.hpp"
#include "engine/session/strided.hpp"
#include "engine/support/bound_replica.hpp"
#include "engine/support/fake_device_replica.hpp"
#include "engine/support/layers.hpp"
#include "engine/support/perceptron.hpp"
#include "engine/support/plain_replica.hpp"

namespace accelmgr::test {
namespace {

using MakeReplica = std::unique_ptr<replica::Replica> (*)(std::unique_ptr<Network>);

std::unique_ptr<replica::Replica> plain(std::unique_ptr<Network> network) {
  return std::make_unique<PlainReplica>(std::move(network));
}
std::unique_ptr<replica::Replica> fake_device(std::unique_ptr<Network> network) {
  return std::make_unique<FakeDeviceReplica>(std::move(network));
}

/// A batch of elements; the first element has the number `index`.
class Elements {
 public:
  Elements(DType dtype, std::int64_t elements, std::int64_t width, std::int64_t index) {
    std::mt19937_64 random(static_cast<std::uint64_t>(index) + 100);
    Variable input{.name = "input", .dtype = dtype, .shape = {elements, width}};
    input.strides = session::dense_strides(input.shape);
    input_.resize(input.elements() * size_of(dtype));
    input.values = input_.data();
    dtype == DType::float64 ? fill_normal<double>(input, 1, random) : fill_normal<float>(input, 1, random);
    for (std::int64_t i = 0; i < elements; ++i) indices_.push_back(index + i);
    fields_ = {{"input", dtype, input.shape, input_.data()},
               {"index", DType::int64, {elements}, reinterpret_cast<const std::byte*>(indices_.data())}};
  }
  operator std::span<const replica::Field>() const { return fields_; }

 private:
  std::vector<std::byte> input_;
  std::vector<std::int64_t> indices_;
  std::vector<replica::Field> fields_;
};

std::size_t index_of(const session::Manifest& manifest, const std::string& name) {
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i)
    if (manifest.tensors[i].name == name) return i;
  ADD_FAILURE() << "no parameter " << name;
  return 0;
}

/// The offset of element `i`, counted in row-major order, in a tensor of these strides.
std::size_t offset_of(std::size_t i, const std::vector<std::int64_t>& shape,
                      const std::vector<std::int64_t>& strides) {
  std::size_t offset = 0;
  for (std::size_t d = shape.size(); d-- > 0;) {
    offset += i % static_cast<std::size_t>(shape[d]) * static_cast<std::size_t>(strides[d]);
    i /= static_cast<std::size_t>(shape[d]);
  }
  return offset;
}

PerceptronShape random_shape() {
  return {.dtype = DType::float64,
          .inputs = *rc::gen::inRange<std::int64_t>(1, 6),
          .hidden = *rc::gen::inRange<std::int64_t>(1, 7),
          .layers = *rc::gen::inRange(0, 4),
          .dropout = *rc::gen::element(0.0, 0.3),
          .tie = *rc::gen::element(Tie::none, Tie::identity, Tie::storage),
          .seed = *rc::gen::arbitrary<std::uint64_t>()};
}

struct Kind {
  const char* name;
  MakeReplica make;
};
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

class Replicas : public testing::TestWithParam<Kind> {
 protected:
  std::unique_ptr<BoundReplica> bench(const PerceptronShape& shape) const {
    return std::make_unique<BoundReplica>(GetParam().make(make_perceptron(shape)));
  }
};

/// The derivative of the loss with respect to one number of the master. Central differences of the fourth
/// order are needed because BatchNorm curves sharply where the rows of a batch are nearly equal.
double slope(BoundReplica& bench, const Elements& batch, double* number) {
  constexpr double step = 1e-5;
  const double before = *number;
  const auto loss_at = [&](double distance) {
    *number = before + distance;
    return bench.attempt(batch).loss;
  };
  const double near = loss_at(step) - loss_at(-step), far = loss_at(2 * step) - loss_at(-2 * step);
  *number = before;
  return (8 * near - far) / (12 * step);
}

TEST_P(Replicas, GradientsAreThoseOfFiniteDifferencesForAnyShape) {
  const bool ok = rc::check("gradients", [&] {
    const auto shape = random_shape();
    const auto elements = *rc::gen::inRange<std::int64_t>(2, 6);
    const Elements batch(DType::float64, elements, shape.inputs, *rc::gen::inRange<std::int64_t>(0, 8));
    const auto one = bench(shape);
    one->attempt(batch);
    const auto gradients = one->sink().sums;
    for (const auto& [index, gradient] : gradients) {
      const auto& entry = one->manifest().tensors[index];
      RC_ASSERT(entry.group != session::Group::frozen);
      // Two parameters over the same memory: changing one changes the other, so their gradients add up.
      std::optional<std::size_t> partner;
      if (shape.tie == Tie::storage && (index == 0 || entry.shares == 0))
        partner = index == 0 ? index_of(one->manifest(), "decoder.weight") : 0;
      const auto i = *rc::gen::inRange<std::size_t>(0, gradient.size());
      const auto& place = one->place(index);
      const auto offset = offset_of(i, entry.shape, place.strides);
      const auto at = [](const auto& numbers, std::size_t element, const session::TensorEntry& of) {
        return numbers[offset_of(element, of.shape, of.gradient_strides())];
      };
      auto expected = at(gradient, i, entry);
      if (partner) {
        const auto& other = one->manifest().tensors[*partner];
        for (std::size_t j = 0; j < gradient.size(); ++j)
          if (offset_of(j, other.shape, one->place(*partner).strides) == offset)
            expected += at(gradients.at(*partner), j, other);
      }
      const double found = slope(*one, batch, one->values<double>(index) + offset);
      RC_ASSERT(std::abs(found - expected) < 1e-6 * (1 + std::abs(expected)));
    }
  });
  EXPECT_TRUE(ok);
}

TEST_P(Replicas, HandOverNothingForWhatIsFrozenOrNotUsed) {
  const auto one = bench({});
  const auto rare = index_of(one->manifest(), "rare.bias"), scale = index_of(one->manifest(), "scale");
  one->attempt(Elements(DType::float32, 3, 32, rare_every));
  EXPECT_TRUE(one->sink().sums.contains(rare));
  EXPECT_FALSE(one->sink().sums.contains(scale));
  one->attempt(Elements(DType::float32, 3, 32, rare_every + 1));
  EXPECT_FALSE(one->sink().sums.contains(rare));
  EXPECT_EQ(one->sink().sums.size(), one->manifest().tensors.size() - 2);
}

TEST_P(Replicas, DivideLossScalarsAndGradientsAndAddThemOverMicroBatches) {
  const auto one = bench({.dtype = DType::float64, .dropout = 0});
  const Elements batch(DType::float64, 4, 32, 0);
  const auto once = one->attempt(batch);
  const auto gradients = one->sink().sums;
  const auto sum = one->attempt(batch, 8, 2);
  EXPECT_EQ(one->sink().backwards, 2);
  EXPECT_NEAR(sum.loss, once.loss / 4, 1e-12);
  ASSERT_EQ(sum.scalars.size(), 1u);
  EXPECT_EQ(sum.scalars[0].first, "output");
  EXPECT_NEAR(sum.scalars[0].second, once.scalars[0].second / 4, 1e-12);
  for (const auto& [index, gradient] : gradients)
    for (std::size_t i = 0; i < gradient.size(); ++i)
      EXPECT_NEAR(one->sink().sums[index][i], gradient[i] / 4, 1e-12);
}

TEST_P(Replicas, ComputeAgainTheSameBitsFromTheSavedState) {
  const auto one = bench({});
  const Elements batch(DType::float32, 4, 32, 0);
  const auto first = one->attempt(batch).loss;
  const auto gradients = one->sink().sums;
  EXPECT_EQ(one->attempt(batch).loss, first) << "nothing was saved since: dropout draws the same";
  EXPECT_EQ(one->sink().sums, gradients);
  const auto buffers = one->saved_buffers();
  one->save();
  EXPECT_NE(one->saved_buffers(), buffers);
  EXPECT_NE(one->attempt(batch).loss, first) << "dropout goes on";
}

TEST_P(Replicas, ForgetAnAttemptThatWasGivenUp) {
  const auto one = bench({});
  const Elements batch(DType::float32, 4, 32, 0);
  const auto expected = one->attempt(batch).loss;
  const auto gradients = one->sink().sums;
  one->load();
  one->replica().begin_attempt();
  one->replica().run(Elements(DType::float32, 4, 32, 4), 1);
  EXPECT_EQ(one->attempt(batch).loss, expected);
  EXPECT_EQ(one->sink().sums, gradients);
}

INSTANTIATE_TEST_SUITE_P(All, Replicas,
                         testing::Values(Kind{"Plain", plain}, Kind{"FakeDevice", fake_device}),
                         [](const auto& info) { return info.param.name; });

/// A network whose forward pass ends when the test releases it or the replica cancels it.
class Held final : public Network {
 public:
  Held() { add_parameter("weight", DType::float32, {2}); }
  Output forward(std::span<const replica::Field>) override {
    began.count_down();
    while (!released && !cancelled()) std::this_thread::yield();
    return {.loss = 1};
  }
  void backward(double) override { parameters()[0].used = true; }

  std::latch began{1};
  std::atomic<bool> released = false;
};

class FakeDevice : public testing::Test {
 protected:
  std::unique_ptr<Held> network_ = std::make_unique<Held>();
  Held& held = *network_;
  BoundReplica bench{fake_device(std::move(network_))};
};

TEST_F(FakeDevice, ComputesWhileRunHasReturned) {
  bench.replica().begin_attempt();
  bench.replica().run({}, 1);
  held.began.wait();
  held.released = true;
  EXPECT_EQ(bench.replica().collect().loss, 1);
  EXPECT_EQ(bench.sink().sums.size(), 1u);
}

TEST_F(FakeDevice, AsksWhetherTheResultIsWantedAndLeavesItWhenNot) {
  bench.replica().begin_attempt();
  bench.replica().run({}, 1);
  bench.replica().run({}, 1);
  int asked = 0;
  bench.sink().asked = [&] { return ++asked < 3; };
  bench.replica().collect();
  EXPECT_EQ(asked, 3);
  EXPECT_TRUE(bench.sink().sums.empty());
  held.released = true;
  bench.sink().asked = nullptr;
  EXPECT_EQ(bench.attempt({}).loss, 1) << "the next is right";
}

TEST(FakeDevices, HandGradientsOverInAnotherOrderThanTheParameters) {
  BoundReplica bench(fake_device(make_perceptron({})));
  bench.attempt(Elements(DType::float32, 3, 32, 0));
  EXPECT_TRUE(std::ranges::is_sorted(bench.sink().order, std::greater()));
  EXPECT_GT(bench.sink().order.size(), 3u);
}

}  // namespace
}  // namespace accelmgr::test
