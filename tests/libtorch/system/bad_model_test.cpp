// Checks that unusable models and elements of libtorch are refused, with an error that says what is wrong.
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "engine/support/expectations.hpp"
#include "places.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

constexpr std::int64_t bad_inputs = 8;
constexpr int batch_size = 4;

/// Does what the option `misdeed` says, in the second micro-batch of rank 1.
class Misdoer final : public Model {
 public:
  explicit Misdoer(const Config& config) {
    if (const auto found = config.model.options.find("misdeed"); found != config.model.options.end())
      misdeed_ = found->second;
  }
  std::vector<NamedTensor> parameters() override { return {{"weight", weight_}}; }
  std::vector<NamedTensor> buffers() override { return {}; }
  void train(bool) override {}
  Outputs forward(const Batch& batch) override {
    const auto y = at::linear(batch["input"], weight_);
    const bool now = ++micro_batches_ == 2 && batch["index"][0].item<std::int64_t>() % 2 == 1;
    if (now && misdeed_ == "vector loss") return {.loss = y};
    if (now && misdeed_ == "replace") weight_.set_data(weight_.detach().clone());
    return {.loss = y.mean()};
  }

 private:
  std::string misdeed_;
  int micro_batches_ = 0;
  at::Tensor weight_ = at::ones({1, bad_inputs}).requires_grad_();
};
const RegisteredModel model("misdoer",
                            [](const Config& config) { return std::make_unique<Misdoer>(config); });

/// A source in which the option `second` says what is wrong with the first element of the second step.
class Misfit final : public BatchSource {
 public:
  explicit Misfit(const Config& config) {
    if (const auto found = config.data.options.find("second"); found != config.data.options.end())
      second_ = found->second;
  }
  std::span<const FieldSpec> fields() const override { return fields_; }
  bool next(ElementWriter& element) override {
    const bool now = index_ == 2 * batch_size;
    element.set(0, at::zeros({now && second_ == "longer" ? bad_inputs + 1 : bad_inputs},
                             now && second_ == "double" ? at::kDouble : at::kFloat));
    element.set(1, at::ones({}, at::kLong).mul(index_));
    ++index_;
    return true;
  }

 private:
  std::string second_;
  std::vector<FieldSpec> fields_{{"input", at::kFloat, {bad_inputs}}, {"index", at::kLong, {}}};
  std::int64_t index_ = 0;
};
const RegisteredData source("misfit", [](const Config& config) { return std::make_unique<Misfit>(config); });

Config misled_config() {
  auto config = small_config("misdoer");
  config.nprocs = 2;
  config.batch_size_per_device = batch_size;
  config.runners.on_loss = LossPolicy::fail;
  config.data.kind = "misfit";
  return config;
}

/// The result of the second step. Checks that the gradients have not changed.
StepResult second_step(const Config& config) {
  auto manager = Manager::start(config);
  expect_ok(manager);
  const auto gradients = copies(manager.gradients());
  auto result = manager.step();
  EXPECT_TRUE(same_bits(copies(manager.gradients()), gradients));
  return result;
}

StepResult step_with(const std::string& misdeed) {
  auto config = misled_config();
  config.model.options["misdeed"] = misdeed;
  auto result = second_step(config);
  EXPECT_EQ(result.rank, 1);
  return result;
}

TEST(BadModel, ALossThatIsNoScalarIsRefusedWithItsShape) {
  const auto result = step_with("vector loss");
  expect_failed(result, StepStatus::runner_lost, {"[4, 1]", "mean()"});
  EXPECT_EQ(result.error_type, "ModelError");
}

TEST(BadModel, OneThatReplacesItsParameterIsToldWhich) {
  const auto result = step_with("replace");
  expect_failed(result, StepStatus::runner_lost, {"'weight'", "replaced"});
  EXPECT_EQ(result.error_type, "ModelError");
}

StepResult step_with_element(const std::string& second) {
  auto config = misled_config();
  config.data.options["second"] = second;
  return second_step(config);
}

TEST(BadData, AnElementOfAnotherDtypeOrShapeThanDeclaredIsRefusedWithBoth) {
  for (const auto& [second, got] :
       {std::pair{"double", "got float64 [8]"}, std::pair{"longer", "got float32 [9]"}}) {
    const auto result = step_with_element(second);
    expect_failed(result, StepStatus::data_end, {"'input'", "expected float32 [8]", got});
    EXPECT_EQ(result.error_type, "DataError");
  }
}

Config torchscript_config(const std::string& file) {
  auto config = small_config("torchscript");
  config.nprocs = 2;
  config.runners.on_loss = LossPolicy::fail;
  config.model.file = file;
  config.data.kind = "vectors";
  return config;
}

std::string refusal_of(const Config& config) {
  const auto what = message_of<ModelError>([&] { Manager::start(config); });
  expect_nothing_left();
  return what;
}

TEST(BadTorchScript, AFileThatIsNoneIsRefused) {
  const std::string file = "/proc/self/exe";
  expect_contains(refusal_of(torchscript_config(file)), {file, "torch.jit.save"});
}

TEST(BadTorchScript, AFileThatIsNotThereIsRefused) {
  expect_contains(refusal_of(torchscript_config("/nowhere/model.pt")), {"model.file", "/nowhere/model.pt"});
}

TEST(BadTorchScript, AnOutputWithoutLossIsRefusedWithWhatItHas) {
  auto manager = Manager::start(torchscript_config(built("tests/libtorch/model/scripts/DictWithoutLoss.pt")));
  const auto result = manager.step();
  expect_failed(result, StepStatus::runner_lost, {"DictWithoutLoss.pt", "without a tensor 'loss'"});
  EXPECT_EQ(result.error_type, "ModelError");
}

// libtorch's own registry knows some of these names. accelmgr's registry does not, and refuses them.
TEST(BadModel, AnUnknownOneIsRefusedWithTheNearestName) {
  auto config = misled_config();
  config.model.kind = "misdoor";
  expect_contains(message_of<ConfigError>([&] { Manager::start(config); }), {"misdoor", "misdoer"});
}

}  // namespace
}  // namespace accelmgr::test
