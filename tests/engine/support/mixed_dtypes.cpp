#include "engine/support/mixed_dtypes.hpp"

#include <fmt/format.h>

#include "accelmgr/errors.hpp"
#include "elements.hpp"

namespace accelmgr::test {
namespace {

Elements elements_at(std::byte* begin, const Variable& variable) {
  return {begin, session::element_of(variable.dtype).value(),
          variable.elements() * session::elements_in(variable.dtype)};
}

std::vector<std::int64_t> shape_in(DType dtype, const Variable& variable) {
  auto shape = variable.shape;
  if (session::elements_in(dtype) == 1) return shape;
  if (shape.empty() || shape.back() % 2 != 0)
    throw ModelError(fmt::format("{} has an odd last dimension and cannot be complex", variable.name));
  shape.back() /= 2;
  return shape;
}

class MixedDtypes final : public Network {
 public:
  MixedDtypes(std::unique_ptr<Network> network, const std::vector<DType>& dtypes)
      : network_(std::move(network)) {
    for (const auto& inner : network_->parameters()) {
      const auto dtype = dtypes.at(parameters().size() % dtypes.size());
      auto& parameter = add_parameter(inner.name, dtype, shape_in(dtype, inner));
      parameter.aliases = inner.aliases;
      parameter.requires_grad = inner.requires_grad;
      elements_at(parameter.values, parameter).change([&](double, std::uint64_t i) {
        return double{reinterpret_cast<const float*>(inner.values)[i]};
      });
    }
    for (const auto& inner : network_->buffers()) {
      auto& buffer = buffers().emplace_back();
      buffer.name = inner.name;
      buffer.dtype = inner.dtype;
      buffer.shape = inner.shape;
      buffer.strides = inner.strides;
      buffer.values = inner.values;
    }
  }

  bool uses(std::size_t parameter, std::span<const replica::Field> batch) const override {
    return network_->uses(parameter, batch);
  }

  Output forward(std::span<const replica::Field> batch) override {
    for (std::size_t p = 0; p < parameters().size(); ++p) {
      const auto& from = parameters()[p];
      const auto numbers = elements_at(from.values, from).numbers();
      std::copy(numbers.begin(), numbers.end(), reinterpret_cast<float*>(network_->parameters()[p].values));
    }
    network_->generator() = generator();
    auto output = network_->forward(batch);
    generator() = network_->generator();
    return output;
  }

  void backward(double scale) override {
    network_->backward(scale);
    for (std::size_t p = 0; p < parameters().size(); ++p) {
      auto& to = parameters()[p];
      const auto& inner = network_->parameters()[p];
      to.used = inner.used;
      elements_at(to.gradient.data(), to).change([&](double, std::uint64_t i) {
        return double{reinterpret_cast<const float*>(inner.gradient.data())[i]};
      });
    }
  }

  void cancel(bool cancelled) override {
    Network::cancel(cancelled);
    network_->cancel(cancelled);
  }

 private:
  std::unique_ptr<Network> network_;
};

}  // namespace

std::unique_ptr<Network> with_dtypes(std::unique_ptr<Network> network, const std::vector<DType>& dtypes) {
  return std::make_unique<MixedDtypes>(std::move(network), dtypes);
}

}  // namespace accelmgr::test
