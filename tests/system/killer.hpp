// A process that knows nothing of accelmgr but the names that ps shows, and kills at random.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "ipc/process.hpp"

namespace accelmgr::test {

/// The role (see roles.hpp) in which this program does that; its one argument says how.
inline constexpr const char* kills_at_random = "kills_at_random";

struct KillerOptions {
  std::uint64_t seed = 0;
  int most = 0;  ///< Ends after so many.
  /// Share of each kind of victim, as far as there is one at that moment.
  double runners = 0.7, launchers = 0.12, managers = 0.18;
  double stops = 0.1;  ///< Share of victims that are stopped for a while, and then killed or let go on.
  double longest_stop_s = 1.2;
  /// Between two kills: the logarithm is uniform, so that some come in bursts and some after a calm.
  double shortest_pause_s = 0.002, longest_pause_s = 2.0;
};

/// What it did, by kind: "runner", "launcher", "manager", "runner stopped", ...
using Kills = std::map<std::string, int>;

/// Such a process, looking for victims among the descendants of this one.
class Killer {
 public:
  explicit Killer(const KillerOptions& options);
  ~Killer();
  Killer(const Killer&) = delete;
  Killer& operator=(const Killer&) = delete;

  /// Ends it. Nothing of what it did is under way any more.
  Kills end();

 private:
  ipc::Child process_;
  base::UniqueFd says_, waits_;
};

/// The role's main(). Returns the exit code.
int play_killer(const std::string& argument);

}  // namespace accelmgr::test
