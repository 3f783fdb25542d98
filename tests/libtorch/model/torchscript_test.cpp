#include "libtorch/model/checked_forward.hpp"
#include "libtorch/model/checked_loss.hpp"
#include "libtorch/model/support.hpp"
#include "places.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {
namespace {

Config config_of_file(const std::string& file) {
  Config config;
  config.model.kind = "torchscript";
  config.model.file = file;
  return config;
}

std::unique_ptr<Model> script(const std::string& name) {
  return make(config_of_file(built("tests/libtorch/model/scripts/" + name + ".pt")));
}

Batch script_batch() {
  seed(11);
  return Batch({{"input", at::randn({6, 4})}, {"target", integers(3, {6})}});
}

TEST(TorchScript, TakesTheLossOfADictATupleOrALoneTensor) {
  for (const char* name : {"DictOutput", "TupleOutput", "LoneTensor"}) {
    const auto made = script(name);
    const auto loss = model::checked_loss(made->forward(script_batch()));
    EXPECT_GT(loss.item().toDouble(), 0) << name;
    for (const auto& gradient : gradients(*made, script_batch())) EXPECT_TRUE(gradient.defined()) << name;
  }
}

TEST(TorchScript, OtherNumbersOfADictAreScalarsAndLargerTensorsAreNot) {
  const auto outputs = script("DictOutput")->forward(script_batch());
  ASSERT_EQ(outputs.scalars.size(), 1u);
  EXPECT_EQ(outputs.scalars[0].first, "accuracy");
  EXPECT_GE(outputs.scalars[0].second, 0);
  EXPECT_LE(outputs.scalars[0].second, 1);
}

TEST(TorchScript, ListsParametersAndBuffersUnderTheirNames) {
  const auto made = script("LoneTensor");
  std::set<std::string> parameters, buffers;
  for (const auto& [name, tensor] : made->parameters()) parameters.insert(name);
  for (const auto& [name, tensor] : made->buffers()) buffers.insert(name);
  EXPECT_EQ(parameters, (std::set<std::string>{"layers.0.weight", "layers.0.bias", "layers.1.weight",
                                               "layers.1.bias", "layers.3.weight", "layers.3.bias"}));
  EXPECT_EQ(buffers, (std::set<std::string>{"layers.1.running_mean", "layers.1.running_var",
                                            "layers.1.num_batches_tracked"}));
}

TEST(TorchScript, ItsBuffersFollowTheBatchesWhileTrainingAlone) {
  const auto made = script("LoneTensor");
  const auto buffers = made->buffers();
  const auto mean = std::ranges::find(buffers, "layers.1.running_mean", &NamedTensor::name)->tensor;
  made->train(false);
  made->forward(script_batch());
  EXPECT_TRUE(mean.eq(0).all().item().toBool());
  made->train(true);
  made->forward(script_batch());
  EXPECT_FALSE(mean.eq(0).any().item().toBool());
}

TEST(TorchScript, TiedWeightsAreOneTensorUnderEachName) {
  const auto made = script("Tied");
  const auto parameters = made->parameters();
  ASSERT_EQ(parameters.size(), 2u);
  EXPECT_EQ(parameters[0].name, "encoder.weight");
  EXPECT_EQ(parameters[1].name, "decoder.weight");
  EXPECT_TRUE(parameters[0].tensor.is_same(parameters[1].tensor));
}

TEST(TorchScript, ItsFirstGradientsAreThoseOfAllLaterRuns) {
  const auto made = script("LoneTensor");
  const auto first = gradients(*made, script_batch());
  for (int run = 0; run < 3; ++run) {
    const auto later = gradients(*made, script_batch());
    for (std::size_t i = 0; i < first.size(); ++i)
      EXPECT_TRUE(first[i].equal(later[i])) << made->parameters()[i].name;
  }
}

TEST(TorchScript, FieldsThatForwardDoesNotTakeOrMissesAreNamed) {
  const auto made = script("LoneTensor");
  const Batch misnamed({{"image", at::randn({6, 4})}, {"target", integers(3, {6})}});
  expect_contains(message_of<ModelError>([&] { made->forward(misnamed); }),
                  {"LoneTensor.pt", "(input, target)", "(image, target)"});
  const Batch more({{"input", at::randn({6, 4})}, {"target", integers(3, {6})}, {"mask", at::randn({6})}});
  expect_contains(message_of<ModelError>([&] { made->forward(more); }), {"(input, target, mask)"});
}

TEST(TorchScript, AnOutputWithoutALossIsRefused) {
  const auto forward = [](const char* name) {
    return message_of<ModelError>([&] { model::checked_loss(script(name)->forward(script_batch())); });
  };
  expect_contains(forward("DictWithoutLoss"), {"DictWithoutLoss.pt", "'loss'", "logits, target"});
  expect_contains(forward("NoTensor"), {"NoTensor.pt", "int", "has no loss"});
  expect_contains(forward("TwoLosses"), {"Float", "[6]"});
}

TEST(TorchScript, AnOperationThatFailsIsToldWithTheLineOfTheUsersFile) {
  const auto made = script("LoneTensor");
  const Batch narrow({{"input", at::randn({6, 3})}, {"target", integers(3, {6})}});
  const auto text = message_of<ModelError>([&] { model::checked_forward(*made, narrow); });
  expect_contains(text, {"mat1 and mat2 shapes cannot be multiplied (6x3 and 4x8) (forward() was given input "
                         "Float [6, 3], target Long [6])\n  File \"",
                         "write_scripts.py\", line ", "in forward\n", "self.layers(input)", "<--- HERE"});
  for (const char* part : {"Traceback", "interpreter", "torch/nn", "frame #"})
    EXPECT_EQ(text.find(part), std::string::npos) << text;
}

TEST(TorchScript, WhatAScriptRaisesIsToldWithItsType) {
  const auto made = script("Raises");
  const auto text = message_of<ModelError>([&] { model::checked_forward(*made, script_batch()); });
  expect_contains(text, {"ValueError: 6 elements are too many", "write_scripts.py\", line "});
  EXPECT_EQ(text.find("Traceback"), std::string::npos) << text;
}

TEST(TorchScript, AFileThatIsMissingOrNoTorchScriptIsRefused) {
  expect_contains(message_of<ModelError>([] { make(config_of_file("no/such.pt")); }),
                  {"model.file", "no file 'no/such.pt'"});
  const TemporaryFolder folder;
  const auto file = folder.write("no-script.pt", "not a zip archive");
  expect_contains(message_of<ModelError>([&] { make(config_of_file(file)); }),
                  {"model.file", file, "cannot be loaded as TorchScript", "torch.jit.save"});
}

TEST(TorchScript, ParametersThatShareMemoryInPartAreRefused) {
  expect_contains(message_of<ModelError>([] { script("Overlapping"); }),
                  {"'rows'", "'first_row'", "share memory"});
}

}  // namespace
}  // namespace accelmgr::test
