// The environment of this process.
#pragma once

#include <map>
#include <optional>
#include <string>

namespace accelmgr::launch {

/// In a process just forked: takes no lock, which another thread of the parent may have held.
void replace_environment(const std::map<std::string, std::string>& environment);

/// The environment is `environment` while this exists. Not while other threads look at it.
class EnvironmentScope {
 public:
  explicit EnvironmentScope(const std::map<std::string, std::string>& environment);
  ~EnvironmentScope();
  EnvironmentScope(const EnvironmentScope&) = delete;
  EnvironmentScope& operator=(const EnvironmentScope&) = delete;

 private:
  std::map<std::string, std::optional<std::string>> before_;  ///< Of what was changed; nullopt: was not set.
};

}  // namespace accelmgr::launch
