#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>

#include "libtorch/model/support.hpp"

namespace accelmgr::test {
namespace {

class BuiltIn : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Model> made_ = make(config_of(GetParam()));
  Batch batch_ = batch_of(GetParam());
};

TEST_P(BuiltIn, HasNamesOfItsOwnForAllTensors) {
  std::set<std::string> names;
  for (const auto& tensors : {made_->parameters(), made_->buffers()})
    for (const auto& [name, tensor] : tensors) EXPECT_TRUE(names.insert(name).second) << name;
}

TEST_P(BuiltIn, GivesEveryParameterAGradient) {
  made_->forward(batch_).loss.backward();
  for (const auto& [name, tensor] : made_->parameters()) {
    ASSERT_TRUE(tensor.grad().defined()) << name;
    EXPECT_TRUE(tensor.grad().ne(0).any().item().toBool()) << name;
    EXPECT_TRUE(tensor.grad().isfinite().all().item().toBool()) << name;
  }
}

TEST_P(BuiltIn, LearnsABatchByHeart) {
  const auto first = value_of(made_->forward(batch_));
  for (int step = 0; step < 60; ++step) {
    made_->forward(batch_).loss.backward();
    const at::NoGradGuard no_grad;
    std::set<const void*> updated;
    for (const auto& [name, tensor] : made_->parameters()) {
      if (!updated.insert(tensor.unsafeGetTensorImpl()).second) continue;
      tensor.sub_(tensor.grad().mul(0.5));
      tensor.mutable_grad().reset();
    }
  }
  EXPECT_LT(value_of(made_->forward(batch_)), 0.7 * first);
}

TEST_P(BuiltIn, IsOfTorchsDefaultDtype) {
  const auto previous = c10::get_default_dtype();
  c10::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const auto wide = make(config_of(GetParam()));
  c10::set_default_dtype(previous);
  for (const auto& [name, tensor] : wide->parameters()) EXPECT_EQ(tensor.scalar_type(), at::kDouble) << name;
  const auto loss = wide->forward(batch_).loss;
  EXPECT_EQ(loss.scalar_type(), at::kDouble);
  loss.backward();
}

TEST_P(BuiltIn, RefusesAFieldOfAnotherTypeOrShape) {
  const auto wrong_type =
      batch_["input"].is_floating_point() ? batch_["input"].to(at::kLong) : batch_["input"].to(at::kFloat);
  const Batch other_type({{"input", wrong_type}, {"target", batch_["target"]}});
  expect_contains(message_of<ModelError>([&] { made_->forward(other_type); }),
                  {"'input'", "the model needs"});
  const Batch other_shape({{"input", batch_["input"]}, {"target", batch_["target"].unsqueeze(1)}});
  expect_contains(message_of<ModelError>([&] { made_->forward(other_shape); }),
                  {"'target'", "Long [4, 1", "needs Long [batch"});
  const Batch nameless({{"image", batch_["input"]}, {"target", batch_["target"]}});
  expect_contains(message_of<ModelError>([&] { made_->forward(nameless); }), {"'input'", "image, target"});
}

INSTANTIATE_TEST_SUITE_P(Kinds, BuiltIn, testing::Values("mlp", "convnet", "gpt"),
                         [](const auto& info) { return info.param; });

TEST(Mlp, HasTheParametersOfItsShape) {
  Config config;
  config.model.kind = "mlp";
  config.model.mlp = {.input_size = 512, .hidden_size = 512, .hidden_layers = 4, .output_size = 10};
  std::int64_t count = 0;
  for (const auto& [name, tensor] : make(config)->parameters()) count += tensor.numel();
  EXPECT_EQ(count, 1'055'754);
}

TEST(ConvNet, AnImageTooSmallForItsPoolingIsRefused) {
  auto config = config_of("convnet");
  config.model.convnet.image_size = 3;
  expect_contains(message_of<ConfigError>([&] { make(config); }),
                  {"model.convnet.image_size is 3", "at least 4"});
}

}  // namespace
}  // namespace accelmgr::test
