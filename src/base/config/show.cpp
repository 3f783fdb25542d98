#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/config/loader.hpp"
#include "base/config/table.hpp"

namespace accelmgr::config {
namespace {

// A value wider than this does not widen the column of values, so that the sources stay in view.
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
      "A value comes from the first of these that sets it: a flag (--set key=value; a list is a,b or\n"
      "[a, 'b,c']), the environment (ACCELMGR_ and the key in capitals, with two underscores for a dot:\n"
      "ACCELMGR_MODEL__KIND), the file (YAML, nested or with dotted keys), the default.\n";
  for (const auto& option : options())
    text +=
        fmt::format("\n{}\n    {}\n    {}; default {}\n", option.is_map() ? option.key + ".NAME" : option.key,
                    option.help, allowed(option), default_of(option));
  return text;
}

}  // namespace accelmgr::config
