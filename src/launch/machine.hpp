// What the resolution of a launch looks at besides the options: this host, and the environment of this
// process. Everything that follows is a pure function of both.
#pragma once

#include <functional>
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
  /// Why a backend cannot be used here; empty: it can. Called for one that the options name, and for the list
  /// of those that can be used: to know of gloo, its plug-in is loaded.
  std::function<std::string(const std::string& backend)> unavailable_because = [](const std::string&) {
    return std::string();
  };
};

/// Asks no device library: no context is made, nothing is loaded yet.
Machine this_machine();

}  // namespace accelmgr::launch
