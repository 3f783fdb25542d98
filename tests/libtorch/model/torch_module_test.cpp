#include "accelmgr/torch_module.hpp"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <cmath>

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

TEST(TorchModule, ComputesOnMemoryThatItsParametersArePointedAtAndSwitchesToEvaluation) {
  TorchModule<Net> model(std::make_shared<Net>());
  for (const auto& [name, tensor] : model.parameters()) tensor.set_data(at::zeros_like(tensor));
  const auto outputs = model.forward(net_batch());
  EXPECT_NEAR(value_of(outputs), std::log(4.0), 1e-6) << "a guess: all logits are 0";
  EXPECT_EQ(outputs.scalars.at(0).second, 6);
  model.train(false);
  EXPECT_FALSE(model.module().is_training());
  model.train(true);
  EXPECT_TRUE(model.module().is_training());
}

TEST(TorchModule, NullIsRefused) { EXPECT_THROW(TorchModule<Net>(nullptr), ModelError); }

}  // namespace
}  // namespace accelmgr::test
