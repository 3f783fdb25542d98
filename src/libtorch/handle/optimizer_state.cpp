#include "libtorch/handle/optimizer_state.hpp"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "accelmgr/errors.hpp"

namespace accelmgr::libtorch {
namespace {

std::string joined_names(const std::vector<NamedTensor>& tensors) {
  std::string text;
  for (const auto& [name, tensor] : tensors) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "nothing" : text;
}

[[noreturn]] void refuse_state(const std::string& problem) {
  throw ModelError("Optimizer::load_state: " + problem + "; nothing was changed");
}

/// Throws ModelError unless `given` has every name of `own` once, and no other names.
void check_names(const std::vector<NamedTensor>& own, const std::vector<NamedTensor>& given) {
  const auto count = [](const std::vector<NamedTensor>& tensors, const std::string& name) {
    return std::ranges::count(tensors, name, &NamedTensor::name);
  };
  for (const auto& [name, tensor] : own) {
    const auto times = count(given, name);
    if (times == 0) {
      refuse_state(fmt::format("'{}' is missing: {} {} is needed; the given state has {}", name,
                               at::toString(tensor.scalar_type()), c10::str(tensor.sizes()),
                               joined_names(given)));
    }
    if (times > 1) refuse_state(fmt::format("'{}' is given {} times; it must be given once", name, times));
  }
  for (const auto& [name, tensor] : given) {
    if (count(own, name) == 0) {
      refuse_state(fmt::format("'{}' is unknown to this optimizer, which has {}", name, joined_names(own)));
    }
  }
}

void check_tensor(const NamedTensor& own, const at::Tensor& given) {
  const auto& [name, current] = own;
  if (!given.defined()) refuse_state(fmt::format("the tensor for '{}' is undefined", name));
  if (given.sizes() != current.sizes() || given.scalar_type() != current.scalar_type()) {
    refuse_state(fmt::format("the tensor for '{}' is {} {}; {} {} is needed", name,
                             at::toString(given.scalar_type()), c10::str(given.sizes()),
                             at::toString(current.scalar_type()), c10::str(current.sizes())));
  }
  if (!given.is_cpu() || given.layout() != at::kStrided) {
    refuse_state(
        fmt::format("the tensor for '{}' is a {}; it must be dense and on the CPU", name, given.toString()));
  }
}

}  // namespace

void check_config(const OptimizerConfig& config) {
  if (config.kind == OptimizerKind::sgd && config.nesterov && config.momentum <= 0) {
    throw ConfigError("optimizer.nesterov: Nesterov momentum needs optimizer.momentum above 0, but it is " +
                          std::to_string(config.momentum),
                      "optimizer.nesterov");
  }
  if (config.steps_per_update < 1) {
    throw ConfigError("optimizer.steps_per_update is " + std::to_string(config.steps_per_update) +
                          "; it must be at least 1",
                      "optimizer.steps_per_update");
  }
}

std::vector<std::string> names_in_state(const std::vector<FlatGroup>& groups) {
  std::vector<std::string> names;
  std::array<int, 2> count{};
  for (const auto& group : groups) {
    auto& name = names.emplace_back();
    if (group.kind == FlatGroup::Kind::frozen) continue;
    const auto kind = static_cast<std::size_t>(group.kind);
    name = kind == 0 ? "decay" : "no_decay";
    if (++count[kind] > 1) name += fmt::format(".{}", count[kind]);
  }
  return names;
}

void load_state(const std::vector<NamedTensor>& own, const std::vector<NamedTensor>& given) {
  check_names(own, given);
  const auto given_for = [&](const NamedTensor& tensor) {
    return std::ranges::find(given, tensor.name, &NamedTensor::name)->tensor;
  };
  for (const auto& tensor : own) check_tensor(tensor, given_for(tensor));
  if (const auto updates = given_for(own.back()).item<std::int64_t>(); updates < 0) {
    refuse_state(
        fmt::format("'{}' is {}; it counts updates and must be 0 or more", own.back().name, updates));
  }
  const at::NoGradGuard no_grad;
  for (const auto& tensor : own) tensor.tensor.copy_(given_for(tensor));
}

}  // namespace accelmgr::libtorch
