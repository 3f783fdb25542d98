#include "libtorch/model/layers.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <bit>
#include <cmath>
#include <mutex>

#include "accelmgr/errors.hpp"
#include "base/split_mix.hpp"
#include "libtorch/model/linear.hpp"

namespace accelmgr::model {
namespace {

constexpr double layer_norm_epsilon = 1e-5;

// xoshiro128++ (Blackman and Vigna, https://prng.di.unimi.it), with enough generators side by side to fill a
// vector register.
class VectorRandom {
 public:
  static constexpr std::size_t lanes = 16;
  using Draw = std::array<std::uint32_t, lanes>;

  /// Seeded as its authors do.
  explicit VectorRandom(std::uint64_t seed) {
    base::SplitMix64 seeds(seed);
    for (auto& word : state_)
      for (auto& lane : word) lane = static_cast<std::uint32_t>(seeds.next() >> 32);
  }

  Draw next() noexcept {
    Draw out;
    auto& [a, b, c, d] = state_;
    for (std::size_t i = 0; i < lanes; ++i) {
      out[i] = std::rotl(a[i] + d[i], 7) + a[i];
      const auto shifted = b[i] << 9;
      c[i] ^= a[i];
      d[i] ^= b[i];
      b[i] ^= c[i];
      a[i] ^= d[i];
      c[i] ^= shifted;
      d[i] = std::rotl(d[i], 11);
    }
    return out;
  }

 private:
  std::array<Draw, 4> state_;
};

std::uint64_t draw_seed() {
  auto* generator =
      at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard lock(generator->mutex_);
  return generator->random64();
}

// Uses only integer arithmetic and a selection, so every instruction set gives the same mask.
[[gnu::target_clones("avx512f", "avx2", "default")]] void fill_mask(float* out, std::size_t count,
                                                                    double rate, float kept,
                                                                    std::uint64_t seed) {
  VectorRandom random(seed);
  const auto threshold = static_cast<std::uint32_t>(rate * 0x1p32);
  std::size_t i = 0;
  for (; i + VectorRandom::lanes <= count; i += VectorRandom::lanes) {
    const auto draw = random.next();
    for (std::size_t lane = 0; lane < draw.size(); ++lane)
      out[i + lane] = draw[lane] < threshold ? 0.0F : kept;
  }
  const auto draw = random.next();
  for (std::size_t lane = 0; i < count; ++i, ++lane) out[i] = draw[lane] < threshold ? 0.0F : kept;
}

}  // namespace

at::Tensor Linear::operator()(const at::Tensor& x) const { return model::linear(x, weight, bias); }

at::Tensor LayerNorm::operator()(const at::Tensor& x) const {
  return at::layer_norm(x, weight.sizes(), weight, bias, layer_norm_epsilon);
}

at::Tensor ParameterModel::parameter(const std::string& name, at::Tensor initial) {
  initial.set_requires_grad(true);
  parameters_.push_back({name, initial});
  return initial;
}

at::Tensor ParameterModel::buffer(const std::string& name, at::Tensor initial) {
  buffers_.push_back({name, initial});
  return initial;
}

Linear ParameterModel::linear(const std::string& name, std::int64_t in, std::int64_t out) {
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  auto weight = parameter(name + ".weight", uniform({out, in}, bound));
  return {weight, parameter(name + ".bias", uniform({out}, bound))};
}

Linear ParameterModel::normal_linear(const std::string& name, std::int64_t in, std::int64_t out,
                                     double deviation) {
  auto weight = parameter(name + ".weight", normal({out, in}, deviation));
  return {weight, parameter(name + ".bias", at::zeros({out}))};
}

LayerNorm ParameterModel::layer_norm(const std::string& name, std::int64_t width) {
  auto weight = parameter(name + ".weight", at::ones({width}));
  return {weight, parameter(name + ".bias", at::zeros({width}))};
}

at::Tensor uniform(at::IntArrayRef shape, double bound) { return at::empty(shape).uniform_(-bound, bound); }
at::Tensor normal(at::IntArrayRef shape, double deviation) { return at::empty(shape).normal_(0, deviation); }

at::Tensor field(const Batch& batch, const std::string& name, at::ScalarType dtype, at::IntArrayRef shape) {
  const auto& tensor = batch[name];
  const bool floating = c10::isFloatingType(dtype);
  const bool right_dtype = floating ? tensor.is_floating_point() : tensor.scalar_type() == dtype;
  bool right_shape = tensor.dim() == static_cast<std::int64_t>(shape.size()) + 1;
  for (std::size_t i = 0; right_shape && i < shape.size(); ++i)
    right_shape = shape[i] == -1 || shape[i] == tensor.size(static_cast<std::int64_t>(i) + 1);
  if (!right_dtype || !right_shape) {
    std::vector<std::string> wanted{"batch"};
    for (const auto length : shape) wanted.push_back(length == -1 ? "any" : std::to_string(length));
    throw ModelError(fmt::format("field '{}' of the batch is {} [{}]; the model needs {} [{}]", name,
                                 c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "),
                                 floating ? "floating point" : c10::toString(dtype),
                                 fmt::join(wanted, ", ")));
  }
  return floating ? tensor.to(dtype) : tensor;
}

at::Tensor dropout_mask(at::IntArrayRef shape, double rate, at::ScalarType dtype, at::Device device) {
  const double kept = 1 / (1 - rate);
  if (!device.is_cpu())
    return at::empty(shape, at::TensorOptions().dtype(dtype).device(device)).bernoulli_(1 - rate).mul_(kept);
  const bool wide = dtype == at::kDouble;
  auto mask = at::empty(shape, at::TensorOptions().dtype(at::kFloat));
  fill_mask(mask.mutable_data_ptr<float>(), static_cast<std::size_t>(mask.numel()), rate,
            wide ? 1.0F : static_cast<float>(kept), draw_seed());
  return wide ? mask.to(at::kDouble).mul_(kept) : mask.to(dtype);
}

at::Tensor add_dropped(const at::Tensor& residual, const at::Tensor& branch, double rate) {
  if (rate == 0) return residual.add(branch);
  const auto mask = dropout_mask(branch.sizes(), rate, residual.scalar_type(), residual.device());
  return at::addcmul(residual, branch, mask);
}

}  // namespace accelmgr::model
