#include <ATen/ops/batch_norm.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <cmath>

#include "accelmgr/errors.hpp"
#include "libtorch/model/built_in.hpp"
#include "libtorch/model/layers.hpp"

namespace accelmgr::model {
namespace {

class Mlp final : public ParameterModel {
 public:
  explicit Mlp(const MlpConfig& config) : input_size_(config.input_size) {
    std::int64_t width = config.input_size;
    for (int i = 0; i < config.hidden_layers; ++i) {
      hidden_.push_back(linear(fmt::format("hidden.{}", i), width, config.hidden_size));
      width = config.hidden_size;
    }
    output_ = linear("output", width, config.output_size);
  }

  Outputs forward(const Batch& batch) override {
    auto x = field(batch, "input", output_.weight.scalar_type(), {input_size_});
    for (const auto& layer : hidden_) x = at::gelu(layer(x));
    return {at::cross_entropy_loss(output_(x), field(batch, "target", at::kLong, {})), {}};
  }

 private:
  std::int64_t input_size_;
  std::vector<Linear> hidden_;
  Linear output_;
};

class ConvNet final : public ParameterModel {
 public:
  explicit ConvNet(const ConvNetConfig& config)
      : input_shape_{config.input_channels, config.image_size, config.image_size} {
    if (config.image_size < smallest_image) {
      throw ConfigError(
          fmt::format("model.convnet.image_size is {}; two poolings that halve the image need at least {}",
                      config.image_size, smallest_image),
          "model.convnet.image_size");
    }
    std::int64_t in = config.input_channels;
    for (int i = 0; i < 3; ++i) {
      const std::int64_t out = std::int64_t{config.channels} << i;
      blocks_.push_back(block(fmt::format("blocks.{}", i), in, out));
      in = out;
    }
    output_ = linear("output", in, config.classes);
  }

  Outputs forward(const Batch& batch) override {
    auto x = field(batch, "input", output_.weight.scalar_type(), input_shape_);
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      if (i > 0) x = at::max_pool2d(x, 2);
      x = at::relu(normalize(blocks_[i], at::conv2d(x, blocks_[i].kernel, {}, 1, 1)));
    }
    const auto features = at::mean(x, at::IntArrayRef{2, 3});
    return {at::cross_entropy_loss(output_(features), field(batch, "target", at::kLong, {})), {}};
  }

 private:
  static constexpr int smallest_image = 4;
  static constexpr std::int64_t kernel_size = 3;

  struct Block {
    at::Tensor kernel;  ///< [out, in, 3, 3]; no bias, because BatchNorm has one.
    at::Tensor weight, bias;
    at::Tensor running_mean, running_var, batches;
  };

  Block block(const std::string& name, std::int64_t in, std::int64_t out) {
    const double bound = 1 / std::sqrt(static_cast<double>(in * kernel_size * kernel_size));
    Block made;
    made.kernel = parameter(name + ".conv.weight", uniform({out, in, kernel_size, kernel_size}, bound));
    made.weight = parameter(name + ".norm.weight", at::ones({out}));
    made.bias = parameter(name + ".norm.bias", at::zeros({out}));
    made.running_mean = buffer(name + ".norm.running_mean", at::zeros({out}));
    made.running_var = buffer(name + ".norm.running_var", at::ones({out}));
    made.batches =
        buffer(name + ".norm.num_batches_tracked", at::zeros({}, at::TensorOptions().dtype(at::kLong)));
    return made;
  }

  at::Tensor normalize(const Block& block, const at::Tensor& x) const {
    constexpr double momentum = 0.1, epsilon = 1e-5;
    if (training()) block.batches.add_(1);
    const auto dtype =
        block.running_mean.scalar_type();  // That of the parameters, unless these were rounded.
    return at::batch_norm(x, block.weight.to(dtype), block.bias.to(dtype), block.running_mean,
                          block.running_var, training(), momentum, epsilon,
                          /*cudnn_enabled=*/false);
  }

  std::vector<std::int64_t> input_shape_;
  std::vector<Block> blocks_;
  Linear output_;
};

}  // namespace

std::unique_ptr<Model> make_mlp(const Config& config) { return std::make_unique<Mlp>(config.model.mlp); }
std::unique_ptr<Model> make_convnet(const Config& config) {
  return std::make_unique<ConvNet>(config.model.convnet);
}

}  // namespace accelmgr::model
