// What is trained under torture: everything that an attempt which does not count must leave no trace in.
#include <ATen/core/Tensor.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>

#include <cstring>

#include "accelmgr/errors.hpp"
#include "data/random.hpp"
#include "support.hpp"
#include "torture.hpp"

namespace accelmgr::test {
namespace {

constexpr std::int64_t inputs = 32;
constexpr std::int64_t hidden = 96;
constexpr std::int64_t rare = 4;

/// An autoencoder. Its decoder's weight is its encoder's; dropout draws from the generator; BatchNorm has
/// buffers, and one more counts what forward() was called for; one parameter has a gradient in every fourth
/// batch alone. 13 chunks of gradients, so that every rank's slice has some.
class TorturedModel final : public Model {
 public:
  std::vector<NamedTensor> parameters() override {
    return {{"encoder.weight", weight_}, {"encoder.bias", encoder_bias_},   {"norm.weight", norm_weight_},
            {"norm.bias", norm_bias_},   {"hidden.weight", hidden_weight_}, {"hidden.bias", hidden_bias_},
            {"decoder.weight", weight_}, {"decoder.bias", decoder_bias_},   {"rare.bias", rare_bias_}};
  }
  std::vector<NamedTensor> buffers() override {
    return {{"norm.running_mean", running_mean_}, {"norm.running_var", running_var_}, {"batches", batches_}};
  }
  void train(bool on) override { training_ = on; }

  Outputs forward(const Batch& batch) override {
    const auto& x = batch["input"];
    const auto h = at::linear(x, weight_, encoder_bias_);
    const auto norm = at::batch_norm(h, norm_weight_, norm_bias_, running_mean_, running_var_, training_,
                                     /*momentum=*/0.1, /*eps=*/1e-5, /*cudnn_enabled=*/false);
    const auto code = at::linear(at::dropout(at::relu(norm), 0.2, training_), hidden_weight_, hidden_bias_);
    auto y = at::linear(code, weight_.t(), decoder_bias_);
    if (batch["index"][0].item<std::int64_t>() % rare == 0) y = y.add(rare_bias_);
    batches_.add_(1);
    return {at::mse_loss(y, x), {}};
  }

 private:
  bool training_ = true;
  at::Tensor weight_ = at::randn({hidden, inputs}).mul_(0.2).requires_grad_();
  at::Tensor encoder_bias_ = at::zeros({hidden}).requires_grad_();
  at::Tensor norm_weight_ = at::ones({hidden}).requires_grad_();
  at::Tensor norm_bias_ = at::zeros({hidden}).requires_grad_();
  at::Tensor hidden_weight_ = at::randn({hidden, hidden}).mul_(0.1).requires_grad_();
  at::Tensor hidden_bias_ = at::zeros({hidden}).requires_grad_();
  at::Tensor decoder_bias_ = at::zeros({inputs}).requires_grad_();
  at::Tensor rare_bias_ = at::zeros({inputs}).requires_grad_();
  at::Tensor running_mean_ = at::zeros({hidden});
  at::Tensor running_var_ = at::ones({hidden});
  at::Tensor batches_ = at::zeros({1}, at::kLong);
};

/// Endless. An element depends on all before it, so that one who goes on at the wrong place gives others.
class TorturedSource final : public BatchSource {
 public:
  explicit TorturedSource(const Config& config) : position_{.chain = config.data.seed} {}

  std::span<const FieldSpec> fields() const override { return fields_; }

  bool next(ElementWriter& element) override {
    position_.chain = data::mix(position_.chain + static_cast<std::uint64_t>(position_.index));
    data::Random random(position_.chain);
    float input[inputs];
    for (auto& x : input) x = random.normal();
    std::memcpy(element.bytes(0).data(), input, sizeof input);
    std::memcpy(element.bytes(1).data(), &position_.index, sizeof position_.index);
    ++position_.index;
    return true;
  }

  std::optional<std::string> state() const override {
    return std::string(reinterpret_cast<const char*>(&position_), sizeof position_);
  }
  void restore(const std::string& state) override {
    if (state.size() != sizeof position_) throw DataError("a state of the tortured source has 16 bytes");
    std::memcpy(&position_, state.data(), sizeof position_);
  }

 private:
  struct Position {
    std::int64_t index = 0;
    std::uint64_t chain;
  };
  std::vector<FieldSpec> fields_{{"input", at::kFloat, {inputs}}, {"index", at::kLong, {}}};
  Position position_;
};

const RegisteredModel model(tortured, [](const Config&) { return std::make_unique<TorturedModel>(); });
const RegisteredData source(tortured,
                            [](const Config& config) { return std::make_unique<TorturedSource>(config); });

}  // namespace
}  // namespace accelmgr::test
