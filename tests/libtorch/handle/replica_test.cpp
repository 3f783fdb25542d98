// Tests of the libtorch replica. The test plays its session and its runner.
#include "libtorch/handle/replica.hpp"

#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <vector>

#include "accelmgr/errors.hpp"
#include "accelmgr/model.hpp"
#include "engine/replica/model.hpp"

namespace accelmgr::libtorch {
namespace {

constexpr std::int64_t replica_width = 4;

/// Does in forward() what the test wants, then computes sum(weight * input), or that without the sum.
class Product final : public Model {
 public:
  explicit Product(std::function<void(Product&)> in_forward = {}) : in_forward_(std::move(in_forward)) {}
  std::vector<NamedTensor> parameters() override { return {{"weight", weight}}; }
  std::vector<NamedTensor> buffers() override { return {{"calls", calls}}; }
  void train(bool) override {}
  Outputs forward(const Batch& batch) override {
    if (in_forward_) in_forward_(*this);
    calls.add_(1);
    const auto products = batch["input"].mul(weight);
    return {sums ? products.sum() : products, {{"drawn", at::rand({1}).item().toDouble()}, {"one", 1.0}}};
  }

  at::Tensor weight = at::ones({replica_width}).requires_grad_(), calls = at::zeros({});
  bool sums = true;

 private:
  std::function<void(Product&)> in_forward_;
};

class ReplicaSums final : public replica::Sink {
 public:
  void capture(std::size_t index, const void* gradient) override {
    ASSERT_EQ(index, 0u);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<const float*>(gradient)[i];
  }
  void backward_begins() override { ++backwards; }
  bool wanted() override { return true; }

  std::array<float, replica_width> sum{};
  int backwards = 0;
};

struct Setting {
  explicit Setting(std::function<void(Product&)> in_forward = {})
      : replica(config, std::make_unique<Product>(std::move(in_forward))),
        manifest(replica::tensors_of(replica.describe()).manifest) {
    manifest.place_tensors();
    buffer_bytes = manifest.place_buffers();
    const replica::Place places[] = {{reinterpret_cast<std::byte*>(master.data()), {1}}};
    replica.bind(manifest, places, sums);
  }
  void run(float value, double divisor) {
    std::array<float, 2 * replica_width> input{};
    input.fill(value);
    const replica::Field fields[] = {
        {"input", DType::float32, {2, replica_width}, reinterpret_cast<const std::byte*>(input.data())}};
    replica.run(fields, divisor);
  }
  std::vector<std::byte> saved() {
    std::vector<std::byte> state(buffer_bytes + session::generator_bytes);
    replica.save({state.data(), std::span(state).subspan(buffer_bytes)});
    return state;
  }
  void load(const std::vector<std::byte>& state) {
    replica.load({state.data(), std::span(state).subspan(buffer_bytes)});
  }

  Config config;
  Replica replica;
  session::Manifest manifest;
  std::uint64_t buffer_bytes = 0;
  std::array<float, replica_width> master{1, 2, 3, 4};
  ReplicaSums sums;
};

TEST(LibtorchReplica, ComputesWithTheMastersParametersAndSumsItsMicroBatches) {
  Setting setting;
  setting.replica.begin_attempt();
  setting.run(1, 4);
  setting.run(3, 4);
  const auto totals = setting.replica.collect();
  EXPECT_DOUBLE_EQ(totals.loss, (2 * 10 * 1 + 2 * 10 * 3) / 4.0);
  EXPECT_EQ(setting.sums.sum, (std::array<float, replica_width>{2, 2, 2, 2}));
  EXPECT_EQ(setting.sums.backwards, 2);
  ASSERT_EQ(totals.scalars.size(), 2u);
  EXPECT_EQ(totals.scalars[1], (std::pair<std::string, double>("one", 0.5)));
}

TEST(LibtorchReplica, AnAttemptThatWasGivenUpLeavesNothing) {
  Setting setting;
  setting.replica.begin_attempt();
  setting.run(100, 1);
  setting.replica.begin_attempt();
  setting.run(1, 1);
  EXPECT_DOUBLE_EQ(setting.replica.collect().loss, 20);
}

TEST(LibtorchReplica, WorkingStateComesBackAsItWas) {
  Setting setting;
  setting.replica.seed(7);
  const auto before = setting.saved();
  const auto drawn = [&] {
    setting.replica.begin_attempt();
    setting.run(1, 1);
    return setting.replica.collect().scalars[0].second;
  };
  const auto first = drawn();
  EXPECT_NE(drawn(), first);
  setting.load(before);
  EXPECT_EQ(drawn(), first);
}

TEST(LibtorchReplica, ALossThatIsNoNumberIsToldByTheTotals) {
  Setting setting;
  setting.replica.begin_attempt();
  setting.run(1, std::nan(""));
  EXPECT_TRUE(std::isnan(setting.replica.collect().loss));
}

template <class Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const ModelError& error) {
    return error.what();
  }
  return {};
}

TEST(LibtorchReplica, AParameterThatForwardMovedOrReplacedIsNamed) {
  const auto refusal = [](std::function<void(Product&)> in_forward) {
    Setting setting(std::move(in_forward));
    setting.replica.begin_attempt();
    setting.run(1, 1);
    return message_of([&] { setting.replica.collect(); });
  };
  const auto moved = refusal([](Product& model) { model.weight.set_data(at::ones({replica_width})); });
  EXPECT_NE(moved.find("'weight' was replaced: it no longer lies in the master's memory"), std::string::npos)
      << moved;
  const auto replaced =
      refusal([](Product& model) { model.weight = model.weight.detach().mul(2).requires_grad_(); });
  EXPECT_NE(replaced.find("parameter 'weight' was replaced by the model"), std::string::npos) << replaced;
}

TEST(LibtorchReplica, ALossThatIsNoScalarIsRefusedWithItsShape) {
  Setting setting([](Product& model) { model.sums = false; });
  setting.replica.begin_attempt();
  const auto message = message_of([&] { setting.run(1, 1); });
  EXPECT_NE(message.find("[2, 4]"), std::string::npos) << message;
  EXPECT_NE(message.find("mean()"), std::string::npos) << message;
}

TEST(LibtorchReplica, AnErrorOfTorchIsAModelErrorWithoutItsFrames) {
  Setting setting([](Product&) { at::ones({2}).add(at::ones({3})); });
  setting.replica.begin_attempt();
  const auto message = message_of([&] { setting.run(1, 1); });
  EXPECT_NE(message.find("must match the size"), std::string::npos) << message;
  EXPECT_NE(message.find("forward() was given input Float [2, 4]"), std::string::npos) << message;
  EXPECT_EQ(message.find("frame #"), std::string::npos) << message;
}

}  // namespace
}  // namespace accelmgr::libtorch
