// Checks that an engine without torch trains. N runners with their own replicas must compute what one process
// computes alone, and the same bits in every run, with replicas in the host's memory and on the transport
// for devices.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>

#include "perceptrons.hpp"
#include "reference.hpp"

namespace accelmgr::test {
namespace {

class Replicas : public testing::TestWithParam<const char*> {};

/// Writes parameters that differ from the initial ones, and differ in each step.
void disturb_parameters(client::Handle& manager, int step) {
  auto values = parameters_of(manager);
  for (auto& tensor : values)
    for (std::size_t i = 0; i < tensor.count(); ++i) {
      const double value = tensor[i] * (1 + 0.01 * (step + 1));
      if (tensor.dtype == DType::float64)
        reinterpret_cast<double*>(tensor.bytes.data())[i] = value;
      else
        reinterpret_cast<float*>(tensor.bytes.data())[i] = float(value);
    }
  write_parameters(manager, values);
}

/// A rank's buffers as the engine gives them out, one after the other.
std::vector<std::byte> bytes_of(const client::Handle& manager, const Tensors& buffers) {
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    bytes.resize(manager.manifest().buffers[i].offset);
    bytes.insert(bytes.end(), buffers[i].bytes.begin(), buffers[i].bytes.end());
  }
  return bytes;
}

void expect_as_reference(const Config& config, int steps, double tolerance) {
  client::Handle manager(config, {});
  Reference reference(config);
  for (int step = 0; step < steps; ++step) {
    disturb_parameters(manager, step);
    const auto expected = reference.step(parameters_of(manager));
    const auto result = expect_ok(manager, {.accumulate = false});
    EXPECT_LE(distance(gradients_of(manager), expected.gradients), tolerance) << step;
    EXPECT_NEAR(result.loss, expected.loss, 1e-6 * expected.loss);
    EXPECT_EQ(result.samples, expected.samples);
    ASSERT_EQ(result.scalars.size(), expected.scalars.size());
    for (const auto& [name, value] : result.scalars) EXPECT_NEAR(value, expected.scalars.at(name), 1e-6);
    auto buffers = reference.buffers(0);
    const auto actual = bytes_of(manager, buffers_of(manager));
    buffers.resize(actual.size());  // The actual bytes may end in a gap.
    EXPECT_EQ(actual, buffers);
  }
}

TEST_P(Replicas, ComputeTheGradientsOfOneProcessForAnyShape) {
  const bool ok = rc::check("as one process", [&] {
    PerceptronShape shape{.inputs = *rc::gen::inRange<std::int64_t>(1, 40),
                          .hidden = *rc::gen::inRange<std::int64_t>(1, 60),
                          .layers = *rc::gen::inRange(0, 3),
                          .dropout = *rc::gen::element(0.0, 0.3),
                          .tie = *rc::gen::element(Tie::none, Tie::identity, Tie::storage)};
    if (*rc::gen::arbitrary<bool>()) shape.dtype = DType::float64;
    auto config = perceptron_config(shape, GetParam());
    config.nprocs = *rc::gen::inRange(1, 4);
    config.grad_accumulation_steps = *rc::gen::inRange(1, 4);
    config.seed_base = *rc::gen::inRange<std::uint64_t>(0, 1000);
    expect_as_reference(config, 3, shape.dtype == DType::float64 ? 1e-12 : 1e-5);
    RC_ASSERT(!testing::Test::HasFailure());
  });
  EXPECT_TRUE(ok);
}

TEST_P(Replicas, ComputeAnUnevenLastStepByItsSamplesOrAsASum) {
  auto config = perceptron_config({.inputs = 4, .hidden = 6}, GetParam());
  config.nprocs = 2;
  config.data.elements = 2 * 3 + 5;  // A step of six elements. Of the other five, rank 0 gets three.
  config.data.epochs = 1;
  config.data.drop_last = false;
  for (const auto scaling : {LossScaling::samples, LossScaling::sum}) {
    config.loss_scaling = scaling;
    expect_as_reference(config, 2, 1e-6);
  }
}

/// Gradients of three steps, and the buffers.
Tensors outcome_of(const Config& config) {
  client::Handle manager(config, {});
  Tensors all;
  for (int step = 0; step < 3; ++step) {
    disturb_parameters(manager, step);
    expect_ok(manager);
    for (auto& tensor : gradients_of(manager)) all.push_back(std::move(tensor));
  }
  for (auto& tensor : buffers_of(manager)) all.push_back(std::move(tensor));
  return all;
}

TEST_P(Replicas, ComputeTheBitsOfOneInTheHostsMemoryAgainAndAgain) {
  auto config = perceptron_config({.inputs = 4, .hidden = 600}, GetParam());
  config.grad_accumulation_steps = 2;
  const auto first = outcome_of(config);
  EXPECT_TRUE(same_bits(first, outcome_of(config)));
  config.model.kind = perceptron;
  EXPECT_TRUE(same_bits(first, outcome_of(config)));
}

// With more micro-batches than one, a device rounds less often.
TEST_P(Replicas, ComputeTheBitsOfOneInTheHostsMemoryInBfloat16Slabs) {
  auto config = perceptron_config({.inputs = 4, .hidden = 60}, GetParam());
  config.gradients.slab_dtype = SlabDtype::bf16;
  const auto narrow = outcome_of(config);
  config.model.kind = perceptron;
  EXPECT_TRUE(same_bits(narrow, outcome_of(config)));
  config.gradients.slab_dtype = SlabDtype::parameters;
  EXPECT_FALSE(same_bits(narrow, outcome_of(config)));
}

INSTANTIATE_TEST_SUITE_P(All, Replicas, testing::Values(perceptron, perceptron_on_fake_device),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace accelmgr::test
