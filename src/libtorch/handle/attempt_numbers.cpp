#include "libtorch/handle/attempt_numbers.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "accelmgr/errors.hpp"

namespace accelmgr::libtorch {

void AttemptNumbers::clear() {
  tensors_.clear();
  parts_.clear();
  scalars_.clear();
}

void AttemptNumbers::add(const Outputs& outputs, double divisor) {
  tensors_.push_back(outputs.loss.detach());
  parts_.emplace_back();
  for (const auto& [name, value] : outputs.scalars) scalars_[scalar(name)].second += value / divisor;
  for (const auto& [name, tensor] : outputs.scalar_tensors) {
    if (!tensor.defined() || tensor.numel() != 1)
      throw ModelError(
          fmt::format("the scalar '{}' of the model's output must be a tensor of one element", name));
    // A copy: the model may go on counting in it.
    tensors_.push_back(tensor.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true));
    parts_.push_back({static_cast<std::ptrdiff_t>(scalar(name)), divisor});
  }
}

/// The index of a scalar. A new scalar begins at 0.
std::size_t AttemptNumbers::scalar(const std::string& name) {
  const auto found = std::ranges::find(scalars_, name, &std::pair<std::string, double>::first);
  const auto index = static_cast<std::size_t>(found - scalars_.begin());
  if (found == scalars_.end()) scalars_.emplace_back(name, 0.0);
  return index;
}

replica::Totals AttemptNumbers::totals(std::span<const double> values) const {
  replica::Totals totals{.scalars = scalars_};
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const auto& part = parts_[i];
    auto& sum = part.scalar < 0 ? totals.loss : totals.scalars[static_cast<std::size_t>(part.scalar)].second;
    sum += values[i] / part.divisor;
  }
  return totals;
}

}  // namespace accelmgr::libtorch
