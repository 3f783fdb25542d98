#include "base/config/loader.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <string_view>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/config/table.hpp"
#include "base/config/yaml.hpp"
#include "base/did_you_mean.hpp"

namespace accelmgr::config {
namespace {

constexpr std::string_view prefix = "ACCELMGR_";
// Variables that are no keys. Tools and the log read them before there is a configuration, or a launch sets
// them for its processes (launcher/launch/plan/variables.hpp), which may read configurations of their own.
constexpr std::string_view not_configuration[] = {
    // clang-format off
    "ACCELMGR_PYTHON", "ACCELMGR_LOG_LEVEL", "ACCELMGR_DISTRIBUTED_BACKEND",
    "ACCELMGR_LAUNCH_BACKEND", "ACCELMGR_LAUNCH_INTERFACE", "ACCELMGR_LAUNCH_TIMEOUT", "ACCELMGR_WORLD_MEMORY",
    "ACCELMGR_SERIAL_MEMORY",
    "ACCELMGR_WORLD_SIZE", "ACCELMGR_LOCAL_WORKER", "ACCELMGR_WORKERS", "ACCELMGR_GPU_NUM_DEVICES",
    "ACCELMGR_TPU_CONFIG", "ACCELMGR_TPU_NUM_DEVICES", "ACCELMGR_SERVICE_ADDRESS", "ACCELMGR_ORDINAL",
    "ACCELMGR_LOCAL_ORDINAL", "ACCELMGR_MP_DEVICE", "ACCELMGR_DEVICE_MAP", "ACCELMGR_WORKER_SOCKET",
    "ACCELMGR_SERVICE_SOCKET", "ACCELMGR_TRAINER_ID", "ACCELMGR_TRAINERS_NUM", "ACCELMGR_CURRENT_ENDPOINT",
    "ACCELMGR_TRAINER_ENDPOINTS", "ACCELMGR_SELECTED_GPUS", "ACCELMGR_SELECTED_XPUS", "ACCELMGR_SELECTED_CUSTOMS",
    // clang-format on
};

std::string variable_of(std::string_view key) {
  std::string name(prefix);
  for (const char c : key) {
    if (c == '.')
      name += "__";
    else
      name += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

std::string key_of(std::string_view variable) {
  std::string key;
  for (auto rest = variable.substr(prefix.size()); !rest.empty();) {
    const bool dot = rest.starts_with("__");
    key += dot ? '.' : static_cast<char>(std::tolower(static_cast<unsigned char>(rest.front())));
    rest.remove_prefix(dot ? 2 : 1);
  }
  return key;
}

RawValue split_at_commas(std::string_view text) {
  RawValue list{RawValue::Form::list, {}};
  while (!text.empty()) {
    const auto comma = text.find(',');
    list.items.emplace_back(text.substr(0, comma));
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
  }
  return list;
}

/// `subject`: what errors name.
RawValue from_text(const Option& option, const std::string& key, const std::string& text,
                   const std::string& subject) {
  if (!option.is_list()) return {RawValue::Form::plain, {text}};
  return text.starts_with('[') && text.ends_with(']') ? parse_list(text, subject, key)
                                                      : split_at_commas(text);
}

void apply(const Assignment& assignment, LoadedConfig& loaded) {
  assign(*assignment.option, assignment.key, assignment.value,
         fmt::format("{}: {}", assignment.where, assignment.key), loaded.config);
  loaded.sources[assignment.key] = assignment.source;
}

// The variable for which an unknown one is probably a misspelling; empty if it probably is not meant for
// accelmgr. Two underscores, the sign for a dot, say that it is; without them it must be near to a known one
// (ACCELMGR_NPROC, ACCELMGR_MODEL_KIND).
std::string meant_variable(const std::string& variable, const std::string& key) {
  if (const auto meant = meant_key(key); !meant.empty() && variable.find("__") != std::string::npos)
    return variable_of(meant);
  std::vector<std::string> keys;
  for (const auto& option : options()) keys.push_back(variable_of(option.key).substr(prefix.size()));
  const auto meant = base::nearest(variable_of(key).substr(prefix.size()), keys);
  return meant.empty() ? "" : std::string(prefix) + meant;
}

void refuse_misspelt(const std::string& variable, const std::string& key) {
  if (is_section(key))
    throw ConfigError(
        fmt::format("environment {}: {} is a section with keys below it; it takes no value", variable, key),
        key);
  const auto meant = meant_variable(variable, key);
  if (meant.empty() && variable.find("__") == std::string::npos) return;
  throw ConfigError(fmt::format("environment {}: {}", variable,
                                meant.empty() ? unknown_key(key) : "unknown" + base::did_you_mean(meant)),
                    key);
}

void apply_environment(const std::map<std::string, std::string>& environment, LoadedConfig& loaded) {
  for (const auto& [variable, value] : environment) {
    if (!variable.starts_with(prefix) ||
        std::ranges::find(not_configuration, variable) != std::end(not_configuration))
      continue;
    const auto key = key_of(variable);
    const auto* option = find_option(key);
    if (option == nullptr || is_section(key) || variable != variable_of(key)) {
      refuse_misspelt(variable, key);
      continue;
    }
    const auto place = "environment " + variable;
    apply({option, key, from_text(*option, key, value, fmt::format("{}: {}", place, key)), place, place},
          loaded);
  }
}

std::string place_of(const Setting& setting) {
  if (!setting.flag.empty()) return setting.flag;
  return setting.where.empty() ? "--set " + setting.assignment : setting.where;
}

/// Returns the key.
std::string apply_setting(const Setting& setting, LoadedConfig& loaded) {
  const auto& text = setting.assignment;
  const auto where = place_of(setting);
  const auto equals = text.find('=');
  if (equals == std::string::npos || equals == 0)
    throw ConfigError(fmt::format("{}: it must have the form key=value, for example nprocs=2", where));
  auto key = text.substr(0, equals);
  const auto* option = find_option(key);
  if (is_section(key))
    throw ConfigError(fmt::format("{}: {} is a section with keys below it; it takes no value", where, key),
                      key);
  if (option == nullptr) throw ConfigError(fmt::format("{}: {}", where, unknown_key(key)), key);
  const auto subject = setting.flag.empty() ? fmt::format("{}: {}", where, key) : setting.flag;
  assign(*option, key, from_text(*option, key, text.substr(equals + 1), subject), subject, loaded.config);
  loaded.sources[key] = "flag";
  if (setting.flag.empty())
    loaded.flags.erase(key);
  else
    loaded.flags[key] = setting.flag;
  return key;
}

bool is_of_key(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.'; }

}  // namespace

std::map<std::string, std::string> accelmgr_environment() {
  std::map<std::string, std::string> found;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view variable = *entry;
    const auto equals = variable.find('=');
    if (variable.starts_with(prefix) && equals != std::string_view::npos)
      found.emplace(variable.substr(0, equals), variable.substr(equals + 1));
  }
  return found;
}

std::string LoadedConfig::name(const std::string& key) const {
  const auto flag = flags.find(key);
  const auto source = sources.find(key);
  if (flag == flags.end() || source == sources.end()) return key;
  return source->second == "flag" || source->second == "default" ? flag->second : key;
}

std::string LoadedConfig::with_names(std::string_view text) const {
  std::string out;
  while (!text.empty()) {
    const auto end = std::ranges::find_if_not(text, is_of_key) - text.begin();
    auto word = text.substr(0, std::max<std::size_t>(1, static_cast<std::size_t>(end)));
    // A full stop ends the sentence; it is no part of the key.
    while (word.size() > 1 && word.ends_with('.')) word.remove_suffix(1);
    out += name(std::string(word));
    text.remove_prefix(word.size());
  }
  return out;
}

LoadedConfig load_config(const std::string& file, std::span<const Setting> settings,
                         const std::map<std::string, std::string>& environment,
                         std::map<std::string, std::string> flags) {
  LoadedConfig loaded;
  loaded.flags = std::move(flags);
  for (const auto& option : options())
    if (!option.is_map()) loaded.sources[option.key] = "default";
  if (!file.empty())
    for (const auto& assignment : read_yaml(file)) apply(assignment, loaded);
  apply_environment(environment, loaded);
  std::map<std::string, std::string> places;  // By key: the place that set it.
  for (const auto& setting : settings) places[apply_setting(setting, loaded)] = place_of(setting);
  if (loaded.sources["nprocs"] == "default" && loaded.config.runners.device != Device::cpu)
    loaded.config.nprocs = one_per_device;
  try {
    validate(loaded.config);
  } catch (const ConfigError& error) {
    const auto& key = error.key();
    const auto what = loaded.with_names(error.what());
    const auto source = loaded.sources.find(key);
    if (source == loaded.sources.end() || loaded.name(key) != key) throw ConfigError(what, key);
    const auto place = places.find(key);
    throw ConfigError(fmt::format("{} ({} comes from: {})", what, key,
                                  place == places.end() ? source->second : place->second),
                      key);
  }
  return loaded;
}

std::string to_yaml(const Config& config) {
  std::string yaml;
  for (const auto& option : options())
    for (const auto& [key, value] : entries(option, config))
      yaml += fmt::format("{}: {}\n", quoted(key), value);
  return yaml;
}

Config from_yaml(const std::string& yaml) {
  Config config;
  for (const auto& assignment : parse_yaml(yaml, "configuration"))
    assign(*assignment.option, assignment.key, assignment.value,
           fmt::format("{}: {}", assignment.where, assignment.key), config);
  return config;
}

}  // namespace accelmgr::config
