// Who has stopped making progress in an attempt: told by the heartbeat from inside the step loop, the
// process's CPU time and its state. Looked at in regular intervals; it ends nobody itself.
//
// clang-format off
//   | the attempt is      | and the runner is silent for | and               | verdict                                    |
//   |---------------------|------------------------------|-------------------|--------------------------------------------|
//   | computing           | runners.hang_timeout         | it was stopped    | stopped                                    |
//   |                     |                              | it used no CPU    | hangs                                      |
//   |                     |                              | ... but wants one | starved: its CPU time counts from then on  |
//   |                     |                              | it uses CPU       | slow: is said once, and step_timeout holds |
//   | committed           | recovery_timeout_s           |                   | does not finish                            |
//   | over, and it is not | abort_grace, silent or not   |                   | has not left                               |
// clang-format on
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "ipc/process.hpp"
#include "session/session.hpp"

namespace accelmgr::manager {

/// A runner that is to be ended, and why.
struct Verdict {
  int rank;
  std::string why;
};

/// An agent: look() is called every `interval_ns`. Used by one thread.
class Watchdog {
 public:
  /// What the kernel says of a process; tests say it themselves.
  using Usage = std::function<std::optional<ipc::ProcessUsage>(pid_t)>;
  Watchdog(const Config& config, const session::Session& session, Usage usage = ipc::usage);

  static constexpr std::int64_t interval_ns = 50'000'000;
  /// A committed reduction is bounded work of milliseconds.
  static constexpr double recovery_timeout_s = 2.0;

  std::vector<Verdict> look(std::int64_t now_ns);

 private:
  struct Seen {
    std::uint64_t attempt = 0;
    std::uint64_t heartbeat = 0;
    std::uint64_t cursor = 0;
    std::uint32_t generation = 0;
    std::int64_t since_ns = 0;   ///< When anything of that was another.
    std::int64_t over_ns = 0;    ///< When the attempt was found aborted; 0: it is not.
    std::int64_t cpu_at_ns = 0;  ///< From when its CPU time counts, past half of the silence; 0: not yet.
    std::uint64_t cpu_ns = 0;    ///< Then.
    bool called_slow = false;
  };
  std::optional<std::string> judge(int rank, std::int64_t now_ns);
  std::string standing(int rank, const char* what, std::int64_t silent_ns,
                       const std::optional<ipc::ProcessUsage>& usage) const;

  const Config& config_;
  const session::Session& session_;
  Usage usage_;
  std::vector<Seen> seen_;
  std::int64_t looked_ns_ = 0;
};

}  // namespace accelmgr::manager
