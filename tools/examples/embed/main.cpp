// A program that embeds accelmgr: it has its own model and data source, and trains ten steps of SGD with two
// runners. It prints the loss of each step, and fails if the loss did not fall.
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/zeros.h>
#include <accelmgr/batch_source.hpp>
#include <accelmgr/config.hpp>
#include <accelmgr/errors.hpp>
#include <accelmgr/init.hpp>
#include <accelmgr/manager.hpp>
#include <accelmgr/model.hpp>
#include <accelmgr/optimizer.hpp>

#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

namespace {

constexpr std::int64_t input_count = 8;
constexpr std::int64_t step_count = 10;

/// target = weight . inputs + bias, with the mean squared error as loss.
class LinearRegression final : public accelmgr::Model {
 public:
  std::vector<accelmgr::NamedTensor> parameters() override { return {{"weight", weight_}, {"bias", bias_}}; }
  std::vector<accelmgr::NamedTensor> buffers() override { return {}; }
  void train(bool) override {}

  accelmgr::Outputs forward(const accelmgr::Batch& batch) override {
    const auto& target = batch["target"];
    const auto prediction = at::linear(batch["inputs"], weight_, bias_);
    const double worst = prediction.detach().sub(target).abs().max().item<double>();
    return {.loss = at::mse_loss(prediction, target), .scalars = {{"worst_error", worst}}};
  }

 private:
  at::Tensor weight_ = at::zeros({1, input_count}).requires_grad_();
  at::Tensor bias_ = at::zeros({1}).requires_grad_();
};

/// Points on a plane with a little noise, without an end.
class NoisyPlane final : public accelmgr::BatchSource {
 public:
  explicit NoisyPlane(std::uint64_t seed) : random_(seed) {}

  std::span<const accelmgr::FieldSpec> fields() const override { return fields_; }

  bool next(accelmgr::ElementWriter& element) override {
    std::array<float, input_count> inputs;
    float target = 0.5F + 0.01F * normal_(random_);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      inputs[i] = normal_(random_);
      target += slope(i) * inputs[i];
    }
    std::memcpy(element.bytes(0).data(), inputs.data(), sizeof inputs);
    std::memcpy(element.bytes(1).data(), &target, sizeof target);
    return true;
  }

 private:
  static float slope(std::size_t i) { return i % 2 == 0 ? 1.0F : -0.5F; }

  std::array<accelmgr::FieldSpec, 2> fields_{
      {{"inputs", at::kFloat, {input_count}}, {"target", at::kFloat, {1}}}};
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
};

accelmgr::Config configuration() {
  accelmgr::Config config;
  config.nprocs = 2;
  config.batch_size_per_device = 32;
  config.model.kind = "linear_regression";
  config.data.kind = "noisy_plane";
  config.optimizer.kind = accelmgr::OptimizerKind::sgd;
  config.optimizer.learning_rate = 0.1;
  return config;
}

int train() {
  const accelmgr::Config config = configuration();
  auto manager = accelmgr::Manager::start(config);
  accelmgr::Optimizer optimizer(config.optimizer, manager.groups(), step_count);

  accelmgr::StepOptions overwrite;
  overwrite.accumulate = false;  // Each update uses one step, so gradients need no zeroing.
  double first_loss = 0;
  double last_loss = 0;
  for (std::int64_t step = 1; step <= step_count; ++step) {
    const accelmgr::StepResult result = manager.step(overwrite);
    if (!result) {
      std::fprintf(stderr, "step %lld: %s: %s\n", static_cast<long long>(step), to_string(result.status),
                   result.error.c_str());
      return 1;
    }
    {
      const auto writing = manager.writing();
      optimizer.step();
    }
    std::printf("step %2lld   loss %.4f   worst error %.3f   %llu samples\n", static_cast<long long>(step),
                result.loss, result.scalars.at(0).second, static_cast<unsigned long long>(result.samples));
    if (step == 1) first_loss = result.loss;
    last_loss = result.loss;
  }
  manager.stop();
  if (!(last_loss < first_loss)) {
    std::fprintf(stderr, "the loss did not fall: %.4f at first, %.4f at last\n", first_loss, last_loss);
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  // The manager is this program executed again. It must know these names too, so they are registered before
  // init(), which does not return there.
  accelmgr::register_model("linear_regression",
                           [](const accelmgr::Config&) { return std::make_unique<LinearRegression>(); });
  accelmgr::register_data("noisy_plane", [](const accelmgr::Config& config) {
    return std::make_unique<NoisyPlane>(config.data.seed);
  });
  try {
    accelmgr::init(argc, argv);
    return train();
  } catch (const accelmgr::Error& error) {
    std::fprintf(stderr, "embed: %s\n", error.what());
    return 1;
  }
}
