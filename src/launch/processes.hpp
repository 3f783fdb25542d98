// The processes of one spawn(), as who called it holds them.
#pragma once

#include <optional>
#include <vector>

#include "launch/spawner.hpp"

namespace accelmgr::launch {

class SpawnContext::Processes {
 public:
  struct Settings {
    bool daemon = false;
    double terminate_timeout_s = 5;
  };
  Processes(Spawner spawner, Settings settings);
  /// Of a function that was called in place: nothing but its result.
  Processes(int rank, Value result);

  /// One more, which joins the others in results() and pids(). Throws as Spawner::start() does.
  void start(const Task& task, std::span<const std::pair<int, int>> fds);
  /// Returns when all that were asked for have been forked. Throws SystemError for one that could not be,
  /// SessionError at the deadline.
  void wait_started(base::Deadline deadline);
  /// What must be there as long as the processes: memory that they open by its number here.
  void hold(base::UniqueFd fd) { held_.push_back(std::move(fd)); }

  bool join(base::Deadline deadline);
  void terminate() noexcept;
  bool daemon() const noexcept { return settings_.daemon; }
  bool running() const noexcept { return !over_; }
  /// Whether this is the process that called spawn(), not one forked from it.
  bool is_ours() const noexcept;
  std::vector<pid_t> pids() const;
  const std::vector<Value>& results() const noexcept { return results_; }

 private:
  enum class Life { asked, running, ended };
  struct Rank {
    int rank = 0;
    Life life = Life::asked;
    pid_t pid = 0;
    base::UniqueFd report;
  };
  /// A failure and where it stands among the others.
  struct Noticed {
    Failure failure;
    std::int64_t seen_ns = 0;  ///< When the launcher saw the end.
    bool reported = false;     ///< The process itself said why.
  };

  /// Nothing until `deadline`: false.
  bool take_event(base::Deadline deadline);
  void take(const ipc::Started& started);
  void take(const ipc::Ended& ended);
  static Report report_of(Rank& rank);
  bool all_ended() const noexcept;
  void end_others() noexcept;
  [[noreturn]] void fail();
  void lose_launcher();

  std::optional<Spawner> spawner_;  ///< None: in place.
  Settings settings_;
  std::vector<base::UniqueFd> held_;
  std::vector<Rank> ranks_;  ///< By slot.
  std::vector<Value> results_;
  std::vector<Noticed> failures_;
  std::optional<SpawnError> error_;  ///< What join() has thrown.
  bool over_ = false;                ///< All have ended, and the launcher too.
  pid_t owner_;
};

}  // namespace accelmgr::launch
