#include "accelmgr/torch_module.hpp"

#include <ATen/ops/cross_entropy_loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include "libtorch/model/support.hpp"

namespace accelmgr::test {
namespace {

class Net : public torch::nn::Module {
 public:
  Net()
      : first_(register_module("first", torch::nn::Linear(4, 4))),
        norm_(register_module("norm", torch::nn::BatchNorm1d(4))),
        last_(register_module("last", torch::nn::Linear(4, 4))) {
    last_->weight = last_->register_parameter("weight_of_first", first_->weight);
  }

  Outputs forward(const Batch& batch) {
    const auto logits = last_(norm_(first_(batch["input"])));
    return {at::cross_entropy_loss(logits, batch["target"]),
            {{"samples", static_cast<double>(logits.size(0))}}};
  }

 private:
  torch::nn::Linear first_;
  torch::nn::BatchNorm1d norm_;
  torch::nn::Linear last_;
};

Batch net_batch() {
  seed(11);
  return Batch({{"input", at::randn({6, 4})}, {"target", integers(4, {6})}});
}

TEST(TorchModule, ListsTensorsUnderTheirNamesTheSameAtEveryCall) {
  TorchModule<Net> model(std::make_shared<Net>());
  std::set<std::string> names;
  for (const auto& [name, tensor] : model.parameters()) names.insert(name);
  for (const char* name :
       {"first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight_of_first", "last.bias"})
    EXPECT_TRUE(names.contains(name)) << name;
  EXPECT_EQ(model.buffers().size(), 3u);
  for (std::size_t i = 0; i < model.parameters().size(); ++i)
    EXPECT_TRUE(model.parameters()[i].tensor.is_same(model.parameters()[i].tensor));
}

TEST(TorchModule, ComputesOnMemoryThatItsParametersArePointedAt) {
  TorchModule<Net> model(std::make_shared<Net>());
  const auto expected = value_of(model.forward(net_batch()));
  BoundMemory memory(model.parameters());
  EXPECT_EQ(value_of(model.forward(net_batch())), expected);
  memory.fill(0);
  EXPECT_NE(value_of(model.forward(net_batch())), expected);
  EXPECT_EQ(model.forward(net_batch()).scalars.at(0).second, 6);
}

TEST(TorchModule, SwitchesTheModuleBetweenTrainingAndEvaluation) {
  TorchModule<Net> model(std::make_shared<Net>());
  model.train(false);
  EXPECT_FALSE(model.module().is_training());
  model.train(true);
  EXPECT_TRUE(model.module().is_training());
}

TEST(TorchModule, NullIsRefused) { EXPECT_THROW(TorchModule<Net>(nullptr), ModelError); }

}  // namespace
}  // namespace accelmgr::test
