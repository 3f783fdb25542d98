// A model whose gradient says which elements were trained, and with which weights, on numbered elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "engine/support/layers.hpp"
#include "engine/support/network.hpp"
#include "table_source.hpp"

namespace accelmgr::test {

/// The elements, in order: field "index".
inline constexpr std::size_t weighed_elements = 64;
inline std::unique_ptr<BatchSource> elements_in_order(const Config& config) {
  return table_source({numbers("index", weighed_elements)}, config.data.epochs, 0);
}

/// The gradient of an element's place is the element's weight in the mean. The loss is the mean of the
/// elements' numbers.
class ElementWeights final : public Network {
 public:
  /// `work`: what each forward() computes besides.
  explicit ElementWeights(std::function<void()> work = [] {}) : work_(std::move(work)) {
    add_parameter("weight", DType::float32, {weighed_elements, 1});
  }
  Output forward(std::span<const replica::Field> batch) override {
    work_();
    const auto& index = field_of(batch, "index");
    const auto* first = reinterpret_cast<const std::int64_t*>(index.data);
    batch_.assign(first, first + index.shape.at(0));
    double sum = 0;
    for (const auto element : batch_) sum += double(element);
    return {.loss = sum / double(batch_.size())};
  }
  void backward(double scale) override {
    auto& weight = parameters()[0];
    std::ranges::fill(weight.gradient, std::byte{0});
    for (const auto element : batch_)
      gradient_of<float>(weight)(static_cast<std::size_t>(element), 0) +=
          float(scale / double(batch_.size()));
  }

 private:
  std::function<void()> work_;
  std::vector<std::int64_t> batch_;
};

}  // namespace accelmgr::test
