#include "engine/data/synthetic_source.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "engine/data/fixtures.hpp"

namespace accelmgr::test {
namespace {

Config synthetic(const std::string& model) {
  Config config;
  config.model.kind = model;
  config.data.kind = "synthetic";
  config.data.sequence_length = 32;
  return config;
}

std::vector<std::string> take(BatchSource& source, std::size_t count = 1'000'000) {
  return element_bytes(source, count);
}

class EveryModel : public ::testing::TestWithParam<const char*> {
 protected:
  Config config_ = synthetic(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Synthetic, EveryModel, ::testing::Values("mlp", "convnet", "gpt"));

TEST_P(EveryModel, ElementsDifferAndAreThoseOfTheirSeed) {
  const auto first = take(*make_data(config_), 200);
  EXPECT_EQ(std::set(first.begin(), first.end()).size(), 200U);
  EXPECT_EQ(take(*make_data(config_), 200), first);
  config_.data.seed = 1;
  EXPECT_NE(take(*make_data(config_), 200), first);
}

TEST_P(EveryModel, AnElementDependsOnItsNumberAndNotOnTheLengthOfAnEpoch) {
  const auto endless = take(*make_data(config_), 20);
  config_.data.elements = 7;
  config_.data.epochs = 2;
  const auto source = make_data(config_);
  const auto epochs = take(*source);
  ASSERT_EQ(epochs.size(), 14U);
  for (std::size_t i = 0; i < 14; ++i) EXPECT_EQ(epochs[i], endless[i % 7]) << i;
  EXPECT_EQ(take(*source).size(), 0U) << "the end stays";
  config_.data.epochs = 0;
  EXPECT_EQ(take(*make_data(config_), 1000).size(), 1000U) << "there is no end";
}

TEST_P(EveryModel, HeldOutElementsAreFiniteManyRestartAndAreNeverTrainedOn) {
  const auto source = make_data(config_);
  const auto held_out = take(*source->held_out());
  EXPECT_EQ(held_out.size(), data::synthetic_held_out_elements);
  EXPECT_EQ(take(*source->held_out()), held_out);
  const auto trained = take(*source, 2000);
  const std::set trained_set(trained.begin(), trained.end());
  for (const auto& element : held_out) EXPECT_FALSE(trained_set.contains(element));
}

TEST_P(EveryModel, GoesOnFromAStateAnywhere) {
  config_.data.elements = 7;
  config_.data.epochs = 3;
  expect_states_restore([&] { return make_data(config_); }, 21);
  config_.data.elements = 0;
  expect_states_restore([&] { return make_data(config_); }, 30);
}

TEST(SyntheticState, HeldOutElementsHaveStatesOfTheirOwn) {
  const auto source = make_data(synthetic("mlp"));
  expect_states_restore([&] { return source->held_out(); }, 20);
  refusal(*source, *source->held_out()->state());
}

TEST(SyntheticState, OfOtherDataIsRefused) {
  Config config = synthetic("mlp");
  config.data.elements = 7;
  const auto state = *make_data(config)->state();
  config.data.seed = 3;
  refusal(*make_data(config), state);
  config.data.elements = 8;
  config.data.seed = 0;
  refusal(*make_data(config), state);
  refusal(*make_data(config), "synthetic seed=0 elements=8 epoch=1 position=9");
}

TEST(SyntheticMlp, HasEveryClassOfTheModel) {
  Config config = synthetic("mlp");
  config.model.mlp.output_size = 5;
  const auto source = make_data(config);
  Reader reader(*source);
  std::set<std::int64_t> classes;
  for (int i = 0; i < 200 && reader.next(); ++i) classes.insert(reader.value<std::int64_t>(1));
  EXPECT_EQ(classes, (std::set<std::int64_t>{0, 1, 2, 3, 4}));
}

// A classifier that knows the mean training element of each class recognizes the classes of held-out ones.
TEST(SyntheticMlp, CanBeLearnedAndWhatIsLearnedHoldsForHeldOutElements) {
  const auto source = make_data(synthetic("mlp"));
  std::map<std::int64_t, std::pair<std::vector<double>, int>> sums;  // Of each class, and how many.
  Reader reader(*source);
  for (int i = 0; i < 2000 && reader.next(); ++i) {
    const auto x = reader.values<float>(0);
    auto& [sum, count] = sums[reader.value<std::int64_t>(1)];
    sum.resize(x.size());
    std::ranges::transform(x, sum, sum.begin(), std::plus());
    ++count;
  }
  const auto held_out = source->held_out();
  Reader unseen(*held_out);
  int right = 0;
  while (unseen.next()) {
    const auto x = unseen.values<float>(0);
    const auto distance = [&](const auto& entry) {
      const auto& [sum, count] = entry.second;
      double squares = 0;
      for (std::size_t k = 0; k < x.size(); ++k) squares += std::pow(x[k] - sum[k] / count, 2);
      return squares;
    };
    right += std::ranges::min_element(sums, {}, distance)->first == unseen.value<std::int64_t>(1) ? 1 : 0;
  }
  EXPECT_GT(right, static_cast<int>(data::synthetic_held_out_elements * 9 / 10));
}

TEST(SyntheticGpt, FieldsFitTheModelAndTheTargetIsTheNextToken) {
  Config config = synthetic("gpt");
  config.model.gpt.vocabulary = 50;
  const auto source = make_data(config);
  Reader reader(*source);
  EXPECT_EQ(source->fields()[0].shape, std::vector<std::int64_t>{32});
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(reader.next());
    const auto input = reader.values<std::int64_t>(0);
    const auto target = reader.values<std::int64_t>(1);
    EXPECT_TRUE(std::equal(input.begin() + 1, input.end(), target.begin()));
    for (const auto token : target) ASSERT_TRUE(token >= 0 && token < 50);
  }
}

TEST(SyntheticGpt, EveryTokenHasAtMostFourSuccessorsInHeldOutElementsToo) {
  const auto source = make_data(synthetic("gpt"));
  const auto held_out = source->held_out();
  std::map<std::int64_t, std::map<std::int64_t, int>> successors;
  Reader training(*source);
  Reader unseen(*held_out);
  const auto count = [&](const Reader& reader) {
    const auto input = reader.values<std::int64_t>(0);
    const auto target = reader.values<std::int64_t>(1);
    for (std::size_t t = 0; t < input.size(); ++t) ++successors[input[t]][target[t]];
  };
  for (int i = 0; i < 2000 && training.next(); ++i) count(training);
  while (unseen.next()) count(unseen);
  for (const auto& [token, next] : successors) EXPECT_LE(next.size(), 4U) << token;
}

TEST(Synthetic, AModelItCannotFitIsRefused) {
  const auto make = [] { make_data(synthetic("torchscript")); };
  expect_contains(message_of<ConfigError>(make), {"synthetic", "mlp, convnet and gpt", "'torchscript'"});
  EXPECT_EQ(config_key_of(make), "data.kind");
}

TEST(Synthetic, ValuesOutOfRangeAreRefusedByKey) {
  const auto key = [](const std::string& model, auto change) {
    Config config = synthetic(model);
    change(config);
    return config_key_of([&] { make_data(config); });
  };
  EXPECT_EQ(key("mlp", [](Config& c) { c.data.elements = -1; }), "data.elements");
  EXPECT_EQ(key("mlp", [](Config& c) { c.data.epochs = -1; }), "data.epochs");
  EXPECT_EQ(key("mlp", [](Config& c) { c.model.mlp.input_size = 0; }), "model.mlp.input_size");
  EXPECT_EQ(key("mlp", [](Config& c) { c.model.mlp.output_size = 0; }), "model.mlp.output_size");
  EXPECT_EQ(key("convnet", [](Config& c) { c.model.convnet.image_size = 0; }), "model.convnet.image_size");
  EXPECT_EQ(key("convnet", [](Config& c) { c.model.convnet.input_channels = 0; }),
            "model.convnet.input_channels");
  EXPECT_EQ(key("convnet", [](Config& c) { c.model.convnet.classes = 0; }), "model.convnet.classes");
  EXPECT_EQ(key("gpt", [](Config& c) { c.model.gpt.vocabulary = 0; }), "model.gpt.vocabulary");
  EXPECT_EQ(key("gpt", [](Config& c) { c.data.sequence_length = 0; }), "data.sequence_length");
  EXPECT_EQ(key("gpt", [](Config& c) { c.model.gpt.context = 31; }), "data.sequence_length");
}

}  // namespace
}  // namespace accelmgr::test
