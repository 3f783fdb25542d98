// A process that kills processes of accelmgr at random. It knows nothing of accelmgr but the names that ps
// shows.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "role_process.hpp"

namespace accelmgr::test {

/// The name of a process that a test starts to be killed with the others.
inline constexpr const char* tortured_host = "tortured:host";

/// The role (see role_process.hpp) in which this program is the killer. Its one argument has the options.
inline constexpr const char* kills_at_random = "kills_at_random";

struct KillerOptions {
  std::uint64_t seed = 0;
  int most = 0;  ///< The killer stops killing after this many kills.
  /// The share of each kind of victim. A kind that has no process at that moment is skipped.
  double runners = 0.7, fork_servers = 0.12, managers = 0.18, hosts = 0;
  double stops = 0.1;  ///< The share of victims that are stopped for a while, and then killed or continued.
  double longest_stop_s = 1.2;
  /// Above 0: managers are never killed. They are stopped for so long at most, and continued. Every second
  /// stop is long, and nobody else is struck meanwhile.
  double longest_manager_stop_s = 0;
  /// Pauses between kills. Their logarithm is uniform: some kills come in bursts, some after a calm.
  double shortest_pause_s = 0.002, longest_pause_s = 2.0;
};

/// The number of deeds of each kind: "runner", "fork server", "manager", "runner stopped", ...
using Kills = std::map<std::string, int>;

/// Starts a killer that looks for victims among the descendants of this process.
class Killer {
 public:
  explicit Killer(const KillerOptions& options);
  ~Killer();
  Killer(const Killer&) = delete;
  Killer& operator=(const Killer&) = delete;

  /// Ends the killer and waits for it. No deed is under way afterwards.
  Kills end();

 private:
  std::optional<RoleProcess> process_;
};

}  // namespace accelmgr::test
