#include "launch/environ.hpp"

#include <unistd.h>

#include <cstdlib>
#include <string_view>
#include <vector>

namespace accelmgr::launch {
namespace {

std::map<std::string, std::string> current() {
  std::map<std::string, std::string> all;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const auto equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    all.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return all;
}

}  // namespace

void replace_environment(const std::map<std::string, std::string>& environment) {
  // Kept to the end of the process. New ones each time: a process that has its environment from here may have
  // forked this one.
  auto& entries = *new std::vector<std::string>;
  auto& pointers = *new std::vector<char*>;
  for (const auto& [name, value] : environment) entries.push_back(name + "=" + value);
  for (auto& entry : entries) pointers.push_back(entry.data());
  pointers.push_back(nullptr);
  environ = pointers.data();
}

EnvironmentScope::EnvironmentScope(const std::map<std::string, std::string>& environment) {
  const auto now = current();
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

EnvironmentScope::~EnvironmentScope() {
  for (const auto& [name, value] : before_) {
    if (value)
      setenv(name.c_str(), value->c_str(), 1);
    else
      unsetenv(name.c_str());
  }
}

}  // namespace accelmgr::launch
