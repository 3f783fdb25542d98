#include "engine/support/perceptron.hpp"

#include <fmt/format.h>

#include <cmath>

#include "engine/support/layers.hpp"

namespace accelmgr::test {
namespace {

template <class T>
class Perceptron final : public Network {
 public:
  explicit Perceptron(const PerceptronShape& shape) : shape_(shape) {
    const auto hidden = shape.hidden, inputs = shape.inputs;
    std::mt19937_64 values(shape.seed);
    add("encoder.weight", {hidden, inputs});
    if (shape.tie == Tie::identity) parameters().back().aliases = {"decoder.weight"};
    add("encoder.bias", {hidden});
    add("norm.weight", {hidden});
    add("norm.bias", {hidden});
    layers_begin_ = parameters().size();
    for (int i = 0; i < shape.layers; ++i) {
      add(fmt::format("layer{}.weight", i), {hidden, hidden});
      add(fmt::format("layer{}.bias", i), {hidden});
    }
    decoder_ = parameters().size();
    if (shape.tie == Tie::none) add("decoder.weight", {hidden, inputs});
    if (shape.tie == Tie::storage) add("decoder.weight", {inputs, hidden});
    decoder_bias_ = parameters().size();
    add("decoder.bias", {inputs});
    add("rare.bias", {inputs});
    add("scale", {inputs});
    parameters().back().requires_grad = false;
    for (auto& parameter : parameters())
      fill_normal<T>(parameter, 1 / std::sqrt(double(parameter.shape.back())), values);
    if (shape.tie == Tie::storage) {
      parameters()[decoder_].bind_values({parameters()[encoder].values, {1, inputs}});
    }
    add_buffer("norm.running_mean", shape.dtype, {hidden});
    fill<T>(add_buffer("norm.running_var", shape.dtype, {hidden}), 1);
    add_buffer("batches", DType::int64, {});
  }

  bool uses(std::size_t parameter, std::span<const replica::Field> batch) const override {
    if (parameter == decoder_bias_ + 1) return is_rare(batch);
    return Network::uses(parameter, batch);
  }

  Output forward(std::span<const replica::Field> batch) override {
    target_ = matrix_of<T>(field_of(batch, "input"));
    rare_ = is_rare(batch);
    ++*reinterpret_cast<std::int64_t*>(buffers()[2].values);

    input_ = target_;
    for (std::size_t b = 0; b < input_.rows; ++b)
      for (std::size_t k = 0; k < input_.columns; ++k) input_(b, k) *= values(parameters().size() - 1)(0, k);
    auto x = linear(input_, values(encoder));
    add_bias(x, values(encoder_bias));
    x = norm_.forward(x, values(norm_weight), values(norm_bias), values_of<T>(buffers()[0]),
                      values_of<T>(buffers()[1]));
    activations_ = {tanh_of(x)};
    inner_ = {dropout(activations_[0], shape_.dropout, generator(), mask_)};
    for (auto at = layers_begin_; at < decoder_; at += 2) {
      x = linear(inner_.back(), values(at));
      add_bias(x, values(at + 1));
      inner_.push_back(tanh_of(x));
    }
    output_ = linear(inner_.back(), decoder_weight());
    add_bias(output_, values(decoder_bias_));
    if (rare_) add_bias(output_, values(decoder_bias_ + 1));
    return {.loss = mean_square(), .scalars = {{"output", mean_output()}}};
  }

  void backward(double scale) override {
    auto d = output_;
    const T factor = T(2 * scale / double(d.values.size()));
    for (std::size_t i = 0; i < d.values.size(); ++i)
      d.values[i] = factor * (output_.values[i] - target_.values[i]);
    for (auto& parameter : parameters()) {
      parameter.used = false;
      std::fill(parameter.gradient.begin(), parameter.gradient.end(), std::byte{0});
    }
    if (rare_) bias_backward(d, gradient(decoder_bias_ + 1));
    bias_backward(d, gradient(decoder_bias_));
    d = linear_backward(d, inner_.back(), decoder_weight(), decoder_gradient());
    for (auto at = decoder_; at > layers_begin_;) {
      at -= 2;
      d = tanh_backward(std::move(d), inner_.back());
      inner_.pop_back();
      bias_backward(d, gradient(at + 1));
      d = linear_backward(d, inner_.back(), values(at), gradient(at));
    }
    d = tanh_backward(dropout_backward(std::move(d), mask_), activations_[0]);
    d = norm_.backward(d, values(norm_weight), gradient(norm_weight), gradient(norm_bias));
    bias_backward(d, gradient(encoder_bias));
    linear_backward(d, input_, values(encoder), gradient(encoder));
    for (auto& parameter : parameters()) limit(parameter);
  }

 private:
  static constexpr std::size_t encoder = 0, encoder_bias = 1, norm_weight = 2, norm_bias = 3;

  static bool is_rare(std::span<const replica::Field> batch) {
    return *reinterpret_cast<const std::int64_t*>(field_of(batch, "index").data) % rare_every == 0;
  }
  void add(const std::string& name, std::vector<std::int64_t> shape) {
    add_parameter(name, shape_.dtype, std::move(shape));
  }
  View<T> values(std::size_t parameter) { return values_of<T>(parameters()[parameter]); }
  View<T> gradient(std::size_t parameter) { return gradient_of<T>(parameters()[parameter]); }

  void limit(Variable& parameter) const {
    auto* values = reinterpret_cast<T*>(parameter.gradient.data());
    for (std::size_t i = 0; i < parameter.elements(); ++i)
      if (std::abs(values[i]) > T(shape_.gradient_limit))
        values[i] = std::copysign(std::numeric_limits<T>::infinity(), values[i]);
  }

  /// [inputs, hidden]
  View<T> decoder_weight() {
    if (shape_.tie == Tie::storage) return values(decoder_);
    return values(shape_.tie == Tie::identity ? encoder : decoder_).transposed();
  }
  View<T> decoder_gradient() {
    if (shape_.tie == Tie::storage) return gradient(decoder_);
    return gradient(shape_.tie == Tie::identity ? encoder : decoder_).transposed();
  }

  double mean_square() const {
    T sum = 0;
    for (std::size_t i = 0; i < output_.values.size(); ++i) {
      const T apart = output_.values[i] - target_.values[i];
      sum += apart * apart;
    }
    return double(sum / T(output_.values.size()));
  }
  double mean_output() const {
    T sum = 0;
    for (const auto value : output_.values) sum += value;
    return double(sum / T(output_.values.size()));
  }

  PerceptronShape shape_;
  std::size_t layers_begin_ = 0, decoder_ = 0, decoder_bias_ = 0;
  // Results of the last forward().
  bool rare_ = false;
  Matrix<T> target_, input_, mask_, output_;
  std::vector<Matrix<T>> activations_, inner_;
  BatchNorm<T> norm_;
};

}  // namespace

std::unique_ptr<Network> make_perceptron(const PerceptronShape& shape) {
  if (shape.dtype == DType::float64) return std::make_unique<Perceptron<double>>(shape);
  return std::make_unique<Perceptron<float>>(shape);
}

}  // namespace accelmgr::test
