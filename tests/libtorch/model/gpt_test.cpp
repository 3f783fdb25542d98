#include <cmath>

#include "libtorch/model/support.hpp"

namespace accelmgr::test {
namespace {

NamedTensor find(Model& model, const std::string& name) {
  const auto parameters = model.parameters();
  const auto found = std::ranges::find(parameters, name, &NamedTensor::name);
  if (found == parameters.end()) throw std::runtime_error("no parameter " + name);
  return *found;
}

TEST(Gpt, HasTheShippedSizeAndGuessesAtFirst) {
  Config config;
  config.model.kind = "gpt";
  const auto made = make(config);
  std::set<const void*> seen;
  std::int64_t count = 0;
  for (const auto& [name, tensor] : made->parameters())
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) count += tensor.numel();
  EXPECT_EQ(count, 842'496);
  const Batch batch({{"input", integers(256, {4, 128})}, {"target", integers(256, {4, 128})}});
  EXPECT_NEAR(value_of(made->forward(batch)), std::log(256), 0.1);
}

TEST(Gpt, ItsOutputSharesTheTokenEmbedding) {
  const auto made = make(config_of("gpt"));
  const auto embedding = find(*made, "token_embedding.weight").tensor,
             output = find(*made, "lm_head.weight").tensor;
  EXPECT_TRUE(embedding.is_same(output));
  // A token that is not in the input has a gradient from the output alone. A token in the input also has one
  // from the embedding.
  auto batch = batch_of("gpt");
  batch["input"].fill_(3);
  gradients(*made, batch);
  made->forward(batch).loss.backward();
  const auto per_token = embedding.grad().norm(2, at::IntArrayRef{1}, false);
  EXPECT_GT(per_token.min().item().toDouble(), 0);
  EXPECT_EQ(per_token.argmax().item().toLong(), 3);
}

// Cross entropy ignores targets of -100. With all others set to -100, the loss is that of one position.
double loss_at(Model& model, const at::Tensor& input, const at::Tensor& target, std::int64_t position) {
  auto only = target.clone().fill_(-100);
  only.select(1, position).copy_(target.select(1, position));
  seed(1);
  return value_of(model.forward(Batch({{"input", input}, {"target", only}})));
}

TEST(Gpt, APositionSeesTheTokensUpToItAndNoLaterOne) {
  const auto batch = batch_of("gpt");
  const auto changed = batch["input"].clone();
  changed.select(1, 5).copy_(changed.select(1, 5).add(1).remainder(32));
  for (const bool training : {true, false}) {
    const auto made = make(config_of("gpt"));
    made->train(training);
    for (std::int64_t position = 0; position < 8; ++position) {
      const auto before = loss_at(*made, batch["input"], batch["target"], position);
      const auto after = loss_at(*made, changed, batch["target"], position);
      if (position < 5)
        EXPECT_EQ(before, after) << "position " << position << ", training " << training;
      else
        EXPECT_NE(before, after) << "position " << position << ", training " << training;
    }
  }
}

TEST(Gpt, DropoutIsOnWhileTrainingAlone) {
  const auto made = make(config_of("gpt"));
  const auto batch = batch_of("gpt");
  seed(1);
  const auto first = value_of(made->forward(batch));
  EXPECT_NE(value_of(made->forward(batch)), first) << "two passes, one mask";
  seed(1);
  EXPECT_EQ(value_of(made->forward(batch)), first);
  made->train(false);
  EXPECT_EQ(value_of(made->forward(batch)), value_of(made->forward(batch)));
}

TEST(Gpt, AttentionWithVanishingDropoutIsThatWithout) {
  auto config = config_of("gpt");
  config.model.gpt.dropout = 1e-12;  // No element is dropped, but masks are used; all are 1.
  const auto masked = make(config);
  config.model.gpt.dropout = 0;
  const auto plain = make(config);
  const auto batch = batch_of("gpt");
  EXPECT_NEAR(value_of(masked->forward(batch)), value_of(plain->forward(batch)), 1e-5);
  const auto ours = gradients(*masked, batch), theirs = gradients(*plain, batch);
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const auto difference = ours[i].sub(theirs[i]).norm().item().toDouble();
    EXPECT_LT(difference, 1e-5 * theirs[i].norm().item().toDouble() + 1e-8) << masked->parameters()[i].name;
  }
}

TEST(Gpt, TakesShorterSequencesAndRefusesLongerOnes) {
  const auto made = make(config_of("gpt"));
  EXPECT_NO_THROW(made->forward(Batch({{"input", integers(32, {2, 5})}, {"target", integers(32, {2, 5})}}))
                      .loss.backward());
  const Batch longer({{"input", integers(32, {2, 9})}, {"target", integers(32, {2, 9})}});
  expect_contains(message_of<ModelError>([&] { made->forward(longer); }),
                  {"9 tokens", "model.gpt.context is 8"});
}

TEST(Gpt, AWidthThatDoesNotDivideIntoHeadsIsRefused) {
  auto config = config_of("gpt");
  config.model.gpt.heads = 3;
  expect_contains(message_of<ConfigError>([&] { make(config); }),
                  {"model.gpt.width is 16", "multiple of model.gpt.heads, which is 3"});
}

}  // namespace
}  // namespace accelmgr::test
