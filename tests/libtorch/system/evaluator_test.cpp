// Tests of the held-out loss, which the host computes between steps.
#include "accelmgr/evaluator.hpp"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "support.hpp"

namespace accelmgr::test {
namespace {

/// The mean loss over the held-out elements, one at a time, from a model with the manager's parameters and
/// buffers.
double expected_loss(Manager& manager) {
  const at::NoGradGuard no_grad;
  const auto& config = manager.config();
  const auto model = make_model(config);
  model->train(false);
  const auto parameters =
      model->parameters();  // The master has tied parameters once; these models have them last.
  for (std::size_t i = 0; i < manager.parameters().size(); ++i)
    parameters.at(i).tensor.set_data(manager.parameters()[i].tensor.detach());
  const auto latest = manager.buffers();
  const auto buffers = model->buffers();
  for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].tensor.copy_(latest.at(i).tensor);

  const auto source = make_data(config);
  const auto held_out = source->held_out();
  double sum = 0;
  int count = 0;
  for (; const auto element = next_element(*held_out); ++count)
    sum += model->forward(Batch(*element)).loss.item().toDouble();
  EXPECT_GT(count, 0);
  return sum / count;
}

class EvaluatorTest : public testing::TestWithParam<const char*> {};

TEST_P(EvaluatorTest, IsTheMeanOverAllHeldOutElementsWithTheMastersParametersAndBuffers) {
  auto config = small_config(GetParam());
  config.train.evaluate_every = 1;
  auto manager = Manager::start(config);
  Evaluator evaluator(manager);
  Optimizer optimizer(config.optimizer, manager.groups(), 3);
  double last = 0;
  for (int step = 0; step < 3; ++step) {
    expect_ok(manager, {.accumulate = false});
    {
      const auto writing = manager.writing();
      optimizer.step();
    }
    const double loss = evaluator.loss();
    EXPECT_NEAR(loss, expected_loss(manager), 1e-4);
    EXPECT_NE(loss, last) << "the parameters have changed";
    last = loss;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, EvaluatorTest, testing::Values("mlp", "convnet", "gpt"));

TEST(Evaluator, DataThatHoldsNothingOutIsRefused) {
  auto config = small_config("mlp");
  config.data.kind = "vectors";
  config.train.evaluate_every = 1;
  auto manager = Manager::start(config);
  EXPECT_NE(message_of<ConfigError>([&] { Evaluator evaluator(manager); }).find("has no held-out data"),
            std::string::npos);
}

}  // namespace
}  // namespace accelmgr::test
