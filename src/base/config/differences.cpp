#include "base/config/differences.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include "base/config/table.hpp"

namespace accelmgr::config {
namespace {

// Keys of options and of whole sections.
constexpr std::array<std::string_view, 17> computed_with{
    "nprocs",
    "batch_size_per_device",
    "grad_accumulation_steps",
    "seed_base",
    "deterministic",
    "loss_scaling",
    "on_nonfinite",
    "runners.device",
    "runners.share",
    "runners.threads",
    "runners.autocast",
    "runners.loss_scale",
    "gradients",
    "buffers",
    "model",
    "data",
    "optimizer",
};

bool matters(std::string_view key, const Config& after) {
  if (key == "train.steps") return after.optimizer.schedule == Schedule::cosine;
  return std::ranges::any_of(computed_with, [&](std::string_view part) {
    return key.starts_with(part) && (key.size() == part.size() || key[part.size()] == '.');
  });
}

std::map<std::string, std::string> values_of(const Option& option, const Config& config) {
  const auto pairs = entries(option, config);
  return {pairs.begin(), pairs.end()};
}

}  // namespace

std::vector<std::string> differences(const Config& before, const Config& after) {
  std::vector<std::string> found;
  for (const auto& option : options()) {
    if (!matters(option.key, after)) continue;
    auto was = values_of(option, before), is = values_of(option, after);
    for (const auto& [key, value] : is) was.try_emplace(key, "(none)");
    for (const auto& [key, value] : was) {
      const auto& now = is.try_emplace(key, "(none)").first->second;
      if (value != now) found.push_back(fmt::format("{} {} -> {}", key, value, now));
    }
  }
  return found;
}

}  // namespace accelmgr::config
