#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "config/loader.hpp"
#include "config/table.hpp"

namespace accelmgr::config {
namespace {

// Beyond this width a value does not push the sources of all others to the right.
constexpr std::size_t widest_value = 40;

using Row = std::array<std::string, 3>;

std::vector<Row> rows(const LoadedConfig& loaded) {
  std::vector<Row> all;
  for (const auto& option : options()) {
    const auto values = entries(option, loaded.config);
    if (values.empty()) all.push_back({option.key, "{}", "default"});
    for (const auto& [key, value] : values) {
      const auto source = loaded.sources.find(key);
      all.push_back({key, value, source == loaded.sources.end() ? "program" : source->second});
    }
  }
  return all;
}

std::string default_of(const Option& option) {
  const auto values = entries(option, Config{});
  return values.empty() ? "{}" : values.front().second;
}

}  // namespace

std::string show(const LoadedConfig& loaded) {
  const auto table = rows(loaded);
  std::array<std::size_t, 2> width{};
  for (const auto& row : table)
    for (std::size_t column = 0; column < width.size(); ++column)
      if (column == 0 || row[column].size() <= widest_value)
        width[column] = std::max(width[column], row[column].size());
  std::string text;
  for (const auto& row : table)
    text += fmt::format("{:<{}}  {:<{}}  {}\n", row[0], width[0], row[1], width[1], row[2]);
  return text;
}

std::string reference() {
  std::string text =
      "A value comes from, strongest first: a flag (--set key=value; the items of a list separated by "
      "commas), the\n"
      "environment (ACCELMGR_ and the key in capitals, dots as two underscores: ACCELMGR_MODEL__KIND), the "
      "file (YAML,\n"
      "nested or with dotted keys), the default.\n";
  for (const auto& option : options())
    text +=
        fmt::format("\n{}\n    {}\n    {}; default {}\n", option.is_map() ? option.key + ".NAME" : option.key,
                    option.help, allowed(option), default_of(option));
  return text;
}

}  // namespace accelmgr::config
