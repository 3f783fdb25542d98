// The processes of one spawn(), as the process that called it holds them.
#pragma once

#include <optional>
#include <vector>

#include "launcher/launch/run/spawner.hpp"

namespace accelmgr::launch {

class SpawnContext::Processes {
 public:
  struct Settings {
    bool daemon = false;
    double terminate_timeout_s = 5;
  };
  Processes(Spawner spawner, Settings settings);
  /// For a function that was called in this process: holds only its result.
  Processes(int rank, Value result);

  /// Starts one more process and adds it to results() and pids(). Throws as Spawner::start() does.
  void start(const Task& task, std::span<const std::pair<int, int>> fds);
  /// Blocks until every start()ed process has been forked. Throws SystemError if a fork failed, SessionError
  /// when the deadline passes or the fork server has ended.
  void wait_started(base::Deadline deadline);
  /// Keeps an object as long as the processes run.
  void hold(std::shared_ptr<void> object) { held_.push_back(std::move(object)); }

  bool join(base::Deadline deadline);
  std::vector<ProcessState> states();
  bool wait(int local_rank, base::Deadline deadline);
  void terminate() noexcept;
  bool daemon() const noexcept { return settings_.daemon; }
  bool running() const noexcept { return !over_; }
  /// True in the process that called spawn(), false in one forked from it.
  bool is_ours() const noexcept;
  std::vector<pid_t> pids() const;
  const std::vector<Value>& results() const noexcept { return results_; }

 private:
  struct Rank {
    int rank = 0;
    pid_t pid = 0;  ///< 0: it was not forked yet.
    base::UniqueFd pidfd;
    std::optional<int> exit_code;  ///< See ProcessState.
    std::optional<Failure> failure;
    base::UniqueFd report;
  };
  /// A failure, and what orders it among the others.
  struct Noticed {
    Failure failure;
    std::int64_t seen_ns = 0;  ///< When the fork server saw the end of the process.
    bool reported = false;     ///< The process itself reported the reason.
  };

  /// Waits for one event and handles it. False if there was none before `deadline`.
  bool take_event(base::Deadline deadline);
  void take(const ipc::Started& started);
  void take(const ipc::Ended& ended);
  static Report report_of(Rank& rank);
  bool all_ended() const noexcept;
  void end_others() noexcept;
  [[noreturn]] void fail();
  /// Notes that a process ended with the fork server.
  void lose(Rank& rank);
  /// Ends the fork server, which kills all that still run.
  void stop() noexcept;

  std::optional<Spawner> spawner_;  ///< nullopt if the function was called in this process.
  Settings settings_;
  std::vector<std::shared_ptr<void>> held_;
  std::vector<Rank> ranks_;  ///< By slot.
  std::vector<Value> results_;
  std::vector<Noticed> failures_;
  std::optional<SpawnError> error_;  ///< The error that join() has thrown, for later calls.
  bool lost_fork_server_ = false;
  bool over_ = false;  ///< All processes and the fork server have ended.
  pid_t owner_;
};

}  // namespace accelmgr::launch
