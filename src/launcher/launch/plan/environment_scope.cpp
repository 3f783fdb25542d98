#include "launcher/launch/plan/environment_scope.hpp"

#include <unistd.h>

#include <cstdlib>
#include <string_view>
#include <vector>

namespace accelmgr::launch {

std::map<std::string, std::string> own_environment() {
  std::map<std::string, std::string> all;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const auto equals = text.find('=');
    if (equals == std::string_view::npos || equals == 0) continue;
    all.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return all;
}

void replace_environment(const std::map<std::string, std::string>& environment) {
  // Never freed, because `environ` points to them. New ones on each call: this process may be a fork of one
  // whose environment was made here.
  auto& entries = *new std::vector<std::string>;
  auto& pointers = *new std::vector<char*>;
  for (const auto& [name, value] : environment) entries.push_back(name + "=" + value);
  for (auto& entry : entries) pointers.push_back(entry.data());
  pointers.push_back(nullptr);
  environ = pointers.data();
}

EnvironmentScope::EnvironmentScope(const std::map<std::string, std::string>& environment) {
  const auto now = own_environment();
  for (const auto& [name, value] : now)
    if (!environment.contains(name)) {
      before_[name] = value;
      unsetenv(name.c_str());
    }
  for (const auto& [name, value] : environment) {
    const auto found = now.find(name);
    if (found != now.end() && found->second == value) continue;
    before_[name] = found == now.end() ? std::nullopt : std::optional(found->second);
    setenv(name.c_str(), value.c_str(), 1);
  }
}

EnvironmentScope::EnvironmentScope(const std::vector<const char*>& names) {
  for (const char* name : names) {
    const char* value = getenv(name);
    before_[name] = value == nullptr ? std::nullopt : std::optional<std::string>(value);
  }
}

EnvironmentScope::~EnvironmentScope() {
  for (const auto& [name, value] : before_) {
    if (value)
      setenv(name.c_str(), value->c_str(), 1);
    else
      unsetenv(name.c_str());
  }
}

}  // namespace accelmgr::launch
