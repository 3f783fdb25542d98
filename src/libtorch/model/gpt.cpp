#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/triu.h>
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "accelmgr/errors.hpp"
#include "libtorch/model/built_in.hpp"
#include "libtorch/model/layers.hpp"
#include "libtorch/model/linear.hpp"

namespace accelmgr::model {
namespace {

// As in GPT-2 ("Language Models are Unsupervised Multitask Learners", 2019).
constexpr double initial_deviation = 0.02;

// The residual stream is always [batch * length, width], so that linear layers need no copy.
class Gpt final : public ParameterModel {
 public:
  explicit Gpt(const GptConfig& config) : config_(config), heads_(config.heads), width_(config.width) {
    if (width_ % heads_ != 0) {
      throw ConfigError(
          fmt::format("model.gpt.width is {}; it must be a multiple of model.gpt.heads, which is {}", width_,
                      heads_),
          "model.gpt.width");
    }
    tokens_ = parameter("token_embedding.weight", normal({config.vocabulary, width_}, initial_deviation));
    positions_ = parameter("position_embedding.weight", normal({config.context, width_}, initial_deviation));
    for (int i = 0; i < config.layers; ++i) blocks_.push_back(block(fmt::format("blocks.{}", i)));
    norm_ = layer_norm("norm", width_);
    tie("lm_head.weight", tokens_);
  }

  Outputs forward(const Batch& batch) override {
    const auto input = field(batch, "input", at::kLong, {-1});
    const auto target = field(batch, "target", at::kLong, {input.size(1)});
    const auto length = input.size(1);
    if (length > config_.context)
      throw ModelError(fmt::format("the batch has sequences of {} tokens, but model.gpt.context is {}",
                                   length, config_.context));
    auto x = embed(input).view({-1, width_});
    for (const auto& block : blocks_) {
      x = add_dropped(x, attend(block, block.attention_norm(x), length), drop_rate());
      x = add_dropped(x, block.contract(at::gelu(block.expand(block.mlp_norm(x)))), drop_rate());
    }
    return {at::cross_entropy_loss(model::linear(norm_(x), tokens_, std::nullopt), target.reshape({-1})), {}};
  }

 private:
  struct Block {
    LayerNorm attention_norm;
    Linear query_key_value;
    Linear projection;
    LayerNorm mlp_norm;
    Linear expand;
    Linear contract;
  };

  Block block(const std::string& name) {
    // 2 * layers branches are added to the residual stream. The factor keeps its variance at that of one.
    const double into_residual = initial_deviation / std::sqrt(2.0 * config_.layers);
    Block made;
    made.attention_norm = layer_norm(name + ".attention_norm", width_);
    made.query_key_value =
        normal_linear(name + ".attention.query_key_value", width_, 3 * width_, initial_deviation);
    made.projection = normal_linear(name + ".attention.projection", width_, width_, into_residual);
    made.mlp_norm = layer_norm(name + ".mlp_norm", width_);
    made.expand = normal_linear(name + ".mlp.expand", width_, 4 * width_, initial_deviation);
    made.contract = normal_linear(name + ".mlp.contract", 4 * width_, width_, into_residual);
    return made;
  }

  double drop_rate() const { return training() ? config_.dropout : 0.0; }

  at::Tensor embed(const at::Tensor& input) const {
    const auto sum = at::embedding(tokens_, input).add(positions_.narrow(0, 0, input.size(1)));
    return drop_rate() == 0
               ? sum
               : sum.mul(dropout_mask(sum.sizes(), drop_rate(), sum.scalar_type(), sum.device()));
  }

  /// Causal self-attention. `x` and the result are [batch * length, width].
  at::Tensor attend(const Block& block, const at::Tensor& x, std::int64_t length) {
    // One copy brings queries, keys and values into the layout that the products need. Without it, each of
    // the three would be copied later.
    const auto parts = block.query_key_value(x)
                           .view({-1, length, 3, heads_, width_ / heads_})
                           .permute({2, 0, 3, 1, 4})
                           .contiguous()
                           .unbind(0);
    const auto attended =
        drop_rate() == 0 || !x.is_cpu()
            ? at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, drop_rate(), true)
            : attend_with_dropout(parts[0], parts[1], parts[2]);
    return block.projection(attended.transpose(1, 2).reshape({-1, width_}));
  }

  // at::scaled_dot_product_attention() has no fused CPU kernel with dropout. Its fallback makes twice as many
  // passes over the probabilities as this function.
  at::Tensor attend_with_dropout(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
    const auto flat = [](const at::Tensor& part) { return part.view({-1, part.size(2), part.size(3)}); };
    const double scale = 1 / std::sqrt(static_cast<double>(query.size(3)));
    const auto scores = at::baddbmm(causal_mask(query.size(2), query.scalar_type()), flat(query),
                                    flat(key).transpose(1, 2), 1, scale);
    const auto weights = at::softmax(scores, -1);
    const auto dropped = weights.mul(dropout_mask(weights.sizes(), config_.dropout, weights.scalar_type()));
    return at::bmm(dropped, flat(value)).view_as(query);
  }

  /// [length, length]; minus infinity where the key comes after the query.
  const at::Tensor& causal_mask(std::int64_t length, at::ScalarType dtype) {
    if (!causal_mask_.defined() || causal_mask_.size(0) != length || causal_mask_.scalar_type() != dtype) {
      causal_mask_ = at::triu(at::full({length, length}, -std::numeric_limits<double>::infinity(),
                                       at::TensorOptions().dtype(dtype)),
                              1);
    }
    return causal_mask_;
  }

  GptConfig config_;
  std::int64_t heads_;
  std::int64_t width_;
  at::Tensor tokens_;     ///< [vocabulary, width]; shared by the embedding and the output layer.
  at::Tensor positions_;  ///< [context, width]
  std::vector<Block> blocks_;
  LayerNorm norm_;
  at::Tensor causal_mask_;
};

}  // namespace

std::unique_ptr<Model> make_gpt(const Config& config) { return std::make_unique<Gpt>(config.model.gpt); }

}  // namespace accelmgr::model
