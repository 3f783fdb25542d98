#include <stdexcept>

#include "libtorch/model/support.hpp"

namespace accelmgr::test {
namespace {

Config of_kind(const std::string& kind) {
  Config config;
  config.model.kind = kind;
  return config;
}

TEST(ModelRegistry, KnowsTheBuiltInKinds) {
  const auto kinds = model_kinds();
  EXPECT_TRUE(std::ranges::is_sorted(kinds));
  for (const char* kind : {"convnet", "gpt", "mlp", "torchscript"})
    EXPECT_EQ(std::ranges::count(kinds, kind), 1) << kind;
}

TEST(ModelRegistry, AnUnknownKindIsRefusedWithTheNearestKnownOne) {
  const auto text = message_of<ConfigError>([] { make_model(of_kind("gtp")); });
  expect_contains(text, {"model.kind", "'gtp'", "did you mean 'gpt'?", "convnet", "torchscript"});
}

TEST(ModelRegistry, ATakenOrEmptyNameAndAnEmptyFactoryAreRefused) {
  const auto factory = [](const Config&) { return std::unique_ptr<Model>(); };
  expect_contains(message_of<UsageError>([&] { register_model("mlp", factory); }), {"'mlp'", "already"});
  expect_contains(message_of<UsageError>([&] { register_model("", factory); }), {"empty"});
  expect_contains(message_of<UsageError>([] { register_model("hollow", {}); }), {"'hollow'", "factory"});
}

TEST(ModelRegistry, AFactoryThatFailsIsNamed) {
  register_model(
      "fails", [](const Config&) -> std::unique_ptr<Model> { throw std::runtime_error("no such weights"); });
  register_model("null", [](const Config&) { return std::unique_ptr<Model>(); });
  expect_contains(message_of<ModelError>([] { make_model(of_kind("fails")); }),
                  {"'fails'", "no such weights"});
  expect_contains(message_of<ModelError>([] { make_model(of_kind("null")); }), {"'null'", "returned null"});
}

TEST(Batch, GivesFieldsByNameAndSaysWhichThereAre) {
  const Batch batch({{"input", at::randn({2, 3})}, {"target", at::randn({2})}});
  EXPECT_EQ(batch["target"].dim(), 1);
  expect_contains(message_of<ModelError>([&] { (void)batch["targte"]; }),
                  {"'targte'", "input, target", "did you mean 'target'?"});
}

}  // namespace
}  // namespace accelmgr::test
