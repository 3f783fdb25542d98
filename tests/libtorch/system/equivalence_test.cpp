// Checks that N runners compute what one process computes alone, and the same bits in every run.

#include "places.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

struct Case {
  std::string name;
  std::string model;
  std::string file{};  ///< A TorchScript file.
  int nprocs = 2;
  int accumulation = 2;
  int hidden_size = 8;  ///< For mlp.
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.model << " on " << c.nprocs << " runners, accumulation " << c.accumulation;
}

Config config_of(const Case& c) {
  auto config = small_config(c.model);
  config.nprocs = c.nprocs;
  config.grad_accumulation_steps = c.accumulation;
  if (c.model == "torchscript") {
    config.model.file = built("tests/libtorch/model/scripts/" + c.file);
    config.data.kind = "vectors";
  }
  config.model.mlp.hidden_size = c.hidden_size;
  return config;
}

/// Writes parameters that differ from the initial ones and in each step. So a step that used a runner's
/// initial values instead of the master's would be found.
void disturb_parameters(Manager& manager, int step) {
  const auto writing = manager.writing();
  for (const auto& group : manager.groups())
    if (group.kind != FlatGroup::Kind::frozen) group.parameters.mul_(1 + 0.01 * (step + 1));
}

class Equivalence : public testing::TestWithParam<Case> {};

TEST_P(Equivalence, GradientsAreThoseOfOneProcessThatComputesTheMeanItself) {
  const auto config = config_of(GetParam());
  auto manager = Manager::start(config);
  Reference reference(config);
  for (int step = 0; step < 3; ++step) {
    disturb_parameters(manager, step);
    const auto expected = reference.step(copies(manager.parameters()));
    const auto result = expect_ok(manager, {.accumulate = false});
    EXPECT_LE(distance(copies(manager.gradients()), expected.gradients), 1e-6) << step;
    EXPECT_NEAR(result.loss, expected.loss, 1e-6 * expected.loss);
    EXPECT_EQ(result.samples, expected.samples);
  }
}

TEST_P(Equivalence, EveryRepetitionHasTheSameBits) {
  const auto run = [&] {
    auto manager = Manager::start(config_of(GetParam()));
    std::vector<at::Tensor> tensors;
    std::vector<double> losses;
    for (int step = 0; step < 3; ++step) {
      disturb_parameters(manager, step);
      losses.push_back(expect_ok(manager).loss);
      const auto gradients = copies(manager.gradients());
      tensors.insert(tensors.end(), gradients.begin(), gradients.end());
    }
    for (const auto& [name, tensor] : manager.buffers()) tensors.push_back(tensor);
    return std::pair(std::move(tensors), std::move(losses));
  };
  const auto [tensors, losses] = run();
  const auto [tensors_again, losses_again] = run();
  EXPECT_TRUE(same_bits(tensors, tensors_again));
  EXPECT_EQ(losses, losses_again);
}

INSTANTIATE_TEST_SUITE_P(
    Models, Equivalence,
    testing::Values(Case{.name = "Mlp", .model = "mlp", .accumulation = 3},
                    Case{.name = "LargeMlp", .model = "mlp", .hidden_size = 600},
                    Case{.name = "ConvNet", .model = "convnet"},
                    Case{.name = "Gpt", .model = "gpt", .nprocs = 3, .accumulation = 1},
                    Case{.name = "TorchScript", .model = "torchscript", .file = "DictOutput.pt"},
                    Case{.name = "TiedTorchScript", .model = "torchscript", .file = "Tied.pt", .nprocs = 3}),
    [](const auto& info) { return info.param.name; });

TEST(Repetition, WithDropoutHasTheSameBitsForTheSameSeed) {
  auto config = small_config("gpt");
  config.model.gpt.dropout = 0.5;
  const auto run = [](const Config& c) {
    auto manager = Manager::start(c);
    expect_ok(manager);
    return copies(manager.gradients());
  };
  const auto first = run(config);
  EXPECT_TRUE(same_bits(first, run(config)));
  config.seed_base += 1;
  EXPECT_FALSE(same_bits(first, run(config)));
}

}  // namespace
}  // namespace accelmgr::test
