// What the resolution of a launch looks at besides the options: this host, and the environment of this
// process. Everything that follows is a pure function of both.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace accelmgr::launch {

struct Machine {
  std::map<std::string, std::string> environment;  ///< Of this process.
  int cores = 1;                                   ///< That this process may run on.
  int gpus = 0;                                    ///< That the driver shows, whatever is visible of them.
  std::string hostname;
  std::vector<std::string> addresses;  ///< Of all interfaces, as text; IPv6 without brackets and zone.
  /// Backends that cannot be used here, with the reason.
  std::map<std::string, std::string> unavailable_backends;
};

/// Asks no device library: no context is made, nothing is loaded.
Machine this_machine();

}  // namespace accelmgr::launch
