// Tests of the libtorch replica. The test plays its session and its runner.
#include "libtorch/handle/replica.hpp"

#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "accelmgr/errors.hpp"
#include "accelmgr/model.hpp"
#include "message_of.hpp"
#include "replica_bench.hpp"

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

struct Setting {
  using Numbers = std::array<float, replica_width>;

  explicit Setting(std::function<void(Product&)> in_forward = {})
      : bench(std::make_unique<Replica>(config, std::make_unique<Product>(std::move(in_forward)))) {
    const Numbers values{1, 2, 3, 4};
    std::memcpy(bench.places[0].data, values.data(), sizeof values);
    begin();
  }
  void begin() {
    bench.sink.gradients.clear();
    bench.replica->begin_attempt();
  }
  void run(float value, double divisor) {
    test::BenchBatch batch;
    batch.add("input", DType::float32, {2, replica_width}, std::vector(2 * replica_width, value));
    bench.replica->run(batch.fields, divisor);
  }
  replica::Totals collect() { return bench.replica->collect(); }
  Numbers gradient() const {
    Numbers numbers{};
    std::memcpy(numbers.data(), bench.sink.gradients.at(0).data(), sizeof numbers);
    return numbers;
  }

  Config config;
  test::ReplicaBench bench;
};

TEST(LibtorchReplica, ComputesWithTheMastersParametersAndSumsItsMicroBatches) {
  Setting setting;
  setting.run(1, 4);
  setting.run(3, 4);
  const auto totals = setting.collect();
  EXPECT_DOUBLE_EQ(totals.loss, (2 * 10 * 1 + 2 * 10 * 3) / 4.0);
  EXPECT_EQ(setting.gradient(), (Setting::Numbers{2, 2, 2, 2}));
  EXPECT_EQ(setting.bench.sink.backwards, 2);
  ASSERT_EQ(totals.scalars.size(), 2u);
  EXPECT_EQ(totals.scalars[1], (std::pair<std::string, double>("one", 0.5)));
}

TEST(LibtorchReplica, AnAttemptThatWasGivenUpLeavesNothing) {
  Setting setting;
  setting.run(100, 1);
  setting.begin();
  setting.run(1, 1);
  EXPECT_DOUBLE_EQ(setting.collect().loss, 20);
}

TEST(LibtorchReplica, WorkingStateComesBackAsItWas) {
  Setting setting;
  const auto before = setting.bench.state;
  const auto drawn = [&] {
    setting.begin();
    setting.run(1, 1);
    return setting.collect().scalars[0].second;
  };
  const auto first = drawn();
  EXPECT_NE(drawn(), first);
  setting.bench.state = before;
  setting.bench.load();
  EXPECT_EQ(drawn(), first);
}

TEST(LibtorchReplica, ALossThatIsNoNumberIsToldByTheTotals) {
  Setting setting;
  setting.run(1, std::nan(""));
  EXPECT_TRUE(std::isnan(setting.collect().loss));
}

TEST(LibtorchReplica, AParameterThatForwardMovedOrReplacedIsNamed) {
  const auto refusal = [](std::function<void(Product&)> in_forward) {
    Setting setting(std::move(in_forward));
    setting.run(1, 1);
    return test::message_of<ModelError>([&] { setting.collect(); });
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
  const auto message = test::message_of<ModelError>([&] { setting.run(1, 1); });
  EXPECT_NE(message.find("[2, 4]"), std::string::npos) << message;
  EXPECT_NE(message.find("mean()"), std::string::npos) << message;
}

TEST(LibtorchReplica, AnErrorOfTorchIsAModelErrorWithoutItsFrames) {
  Setting setting([](Product&) { at::ones({2}).add(at::ones({3})); });
  const auto message = test::message_of<ModelError>([&] { setting.run(1, 1); });
  EXPECT_NE(message.find("must match the size"), std::string::npos) << message;
  EXPECT_NE(message.find("forward() was given input Float [2, 4]"), std::string::npos) << message;
  EXPECT_EQ(message.find("frame #"), std::string::npos) << message;
}

}  // namespace
}  // namespace accelmgr::libtorch
