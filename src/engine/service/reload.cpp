#include "engine/service/reload.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

#include "accelmgr/errors.hpp"
#include "base/config/table.hpp"

namespace accelmgr::service {
namespace {

constexpr std::array<std::string_view, 10> changeable{
    "nprocs",
    "step_timeout",
    "start_timeout",
    "runners.on_loss",
    "runners.min_runners",
    "runners.max_restarts",
    "runners.restarts_per_window",
    "runners.restart_window",
    "runners.restart_backoff",
    "runners.hang_timeout",
};

std::string text_of(const config::Option& option, const Config& config) {
  std::vector<std::string> values;
  for (const auto& [key, value] : config::entries(option, config)) values.push_back(value);
  return fmt::format("{}", fmt::join(values, ","));
}

}  // namespace

Config read_again(const std::string& file, std::span<const config::Setting> settings) {
  std::error_code unknown;
  const auto type = std::filesystem::status(file, unknown).type();
  if (type != std::filesystem::file_type::regular && type != std::filesystem::file_type::not_found)
    throw ConfigError(fmt::format("'{}' is no regular file, and cannot be read again", file));
  return config::load_config(file, settings, config::accelmgr_environment()).config;
}

Reload differences_of(const Config& before, const Config& next) {
  Reload reload;
  for (const auto& option : config::options()) {
    const auto was = text_of(option, before), is = text_of(option, next);
    if (was == is) continue;
    auto& list = std::ranges::find(changeable, option.key) != changeable.end() ? reload.changed : reload.kept;
    list.push_back(fmt::format("{} {} -> {}", option.key, was, is));
  }
  return reload;
}

void take_over(Config& config, const Config& next) {
  config.step_timeout = next.step_timeout;
  config.start_timeout = next.start_timeout;
  auto& runners = config.runners;
  runners.on_loss = next.runners.on_loss;
  runners.min_runners = next.runners.min_runners;
  runners.max_restarts = next.runners.max_restarts;
  runners.restarts_per_window = next.runners.restarts_per_window;
  runners.restart_window = next.runners.restart_window;
  runners.restart_backoff = next.runners.restart_backoff;
  runners.hang_timeout = next.runners.hang_timeout;
}

}  // namespace accelmgr::service
