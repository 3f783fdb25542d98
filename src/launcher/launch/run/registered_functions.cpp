#include "launcher/launch/run/registered_functions.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/did_you_mean.hpp"

namespace accelmgr::launch {
namespace {

std::map<std::string, Function>& functions() {
  static std::map<std::string, Function> all;
  return all;
}

}  // namespace

void register_function(const std::string& name, Function function) {
  if (name.empty()) throw UsageError("the name of a registered function must not be empty");
  if (!functions().emplace(name, std::move(function)).second)
    throw UsageError(fmt::format("a function is already registered under the name '{}'", name));
}

const Function& registered_function(const std::string& name) {
  const auto found = functions().find(name);
  if (found != functions().end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [known, _] : functions()) names.push_back(known);
  throw ConfigError(fmt::format("no function is registered under the name '{}'{}; registered are: {}", name,
                                base::did_you_mean(name, names),
                                names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "))));
}

}  // namespace accelmgr::launch
