// The environment of this process.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/unmovable.hpp"

namespace accelmgr::launch {

/// The variables of this process.
std::map<std::string, std::string> own_environment();

/// Replaces the whole environment. Safe in a process just forked: it does not use setenv(), whose lock
/// another thread of the parent may have held during the fork.
void replace_environment(const std::map<std::string, std::string>& environment);

/// Restores variables of this process at its end. Not safe while another thread calls getenv().
class EnvironmentScope : base::Unmovable {
 public:
  /// Replaces the environment by `environment`. The destructor restores the variables that this changes.
  explicit EnvironmentScope(const std::map<std::string, std::string>& environment);
  /// Changes nothing. The destructor restores these variables.
  explicit EnvironmentScope(const std::vector<const char*>& names);
  ~EnvironmentScope();

 private:
  std::map<std::string, std::optional<std::string>> before_;  ///< To restore; nullopt: was not set.
};

}  // namespace accelmgr::launch
