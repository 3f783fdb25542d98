// Finds runners that make no progress in an attempt, by the heartbeat from inside the step loop, the CPU time
// of the process and its state. It ends no process itself: the supervisor does.
//
// clang-format off
//   | the attempt is       | the runner is silent  | and it          | verdict                        |
//   |----------------------|-----------------------|-----------------|--------------------------------|
//   | computing            | for hang_timeout      | was stopped     | stopped                        |
//   |                      |                       | used no CPU     | hangs                          |
//   |                      |                       | ... is runnable | none: starved, CPU counts anew |
//   |                      |                       | uses CPU        | none: logged once as slow      |
//   | committed            | for reduction_timeout |                 | does not finish                |
//   | over                 | silent or not, for    | has not         | has not left                   |
//   |                      | abort_grace           | acknowledged it |                                |
//   | closed, and runners  | silent or not, for    | has not         | has not made the update        |
//   | apply the gradient   | step_timeout          | acknowledged it | (before that as in computing)  |
// clang-format on
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "base/ipc/process.hpp"
#include "engine/session/session.hpp"

namespace accelmgr::manager {

/// A runner that must be ended, and why.
struct Verdict {
  int rank;
  std::string why;
};

/// The supervisor calls look() every timing::supervisor_look_ns. Used by one thread.
class Watchdog {
 public:
  /// Returns CPU time and state of a process. Tests pass a function of their own.
  using Usage = std::function<std::optional<ipc::ProcessUsage>(pid_t)>;
  Watchdog(const Config& config, const session::Session& session, Usage usage = ipc::usage);

  std::vector<Verdict> look(std::int64_t now_ns);
  /// How long a runner has given no sign of life in an attempt, as of the last look. Any thread.
  std::int64_t silent_ns(int rank) const noexcept;

 private:
  struct Progress {
    std::uint64_t attempt = 0;
    std::uint64_t heartbeat = 0;
    std::uint64_t reduction = 0;
    std::uint32_t generation = 0;
    bool operator==(const Progress&) const = default;
  };
  struct Seen {
    Progress progress{};
    std::int64_t since_ns = 0;   ///< Since when the runner is silent.
    std::int64_t over_ns = 0;    ///< When the attempt was first seen aborted or closed; 0: not yet.
    std::int64_t cpu_at_ns = 0;  ///< Since when CPU time is counted; 0: not yet, before half of the timeout.
    std::uint64_t cpu_ns = 0;    ///< Its CPU time at that moment.
    bool called_slow = false;
  };
  std::optional<std::string> judge(int rank, std::int64_t now_ns);
  /// The silence begins anew if the runner has moved, or has nothing to do (`busy` is false).
  void note_progress(int rank, std::uint64_t attempt, bool busy, Seen& seen, std::int64_t now_ns) const;
  std::optional<std::string> judge_over(int rank, Seen& seen, std::int64_t now_ns) const;
  std::optional<std::string> judge_applying(int rank, Seen& seen, std::int64_t now_ns) const;
  std::optional<std::string> judge_committed(int rank, Seen& seen, std::int64_t now_ns) const;
  std::optional<std::string> judge_computing(int rank, Seen& seen, std::int64_t now_ns) const;
  /// Whether the process has used CPU time since it is counted.
  static bool computes(const ipc::ProcessUsage& usage, const Seen& seen, std::int64_t now_ns) noexcept;
  /// True if the process could run but gets no processor.
  static bool waits_for_processor(const ipc::ProcessUsage& usage, Seen& seen, std::int64_t now_ns) noexcept;
  static void count_cpu_time(Seen& seen, const ipc::ProcessUsage& usage, std::int64_t now_ns) noexcept;
  std::optional<ipc::ProcessUsage> usage_of(int rank) const;
  std::string standing(int rank, const char* what, std::int64_t silent_ns,
                       const std::optional<ipc::ProcessUsage>& usage) const;

  const Config& config_;
  const session::Session& session_;
  Usage usage_;
  std::vector<Seen> seen_;
  std::array<std::atomic<std::int64_t>, session::max_ranks> silent_ns_{};
  std::int64_t looked_ns_ = 0;
};

}  // namespace accelmgr::manager
