// A manager with its runners on a stage, and what a test asks about their processes.
#pragma once

#include <sys/types.h>

#include <future>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/manager.hpp"
#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "ipc/process.hpp"
#include "stage.hpp"

namespace accelmgr::test {

/// More than anything here takes on a loaded machine; reached only by a test that fails.
inline base::Deadline soon() { return base::Deadline::in_seconds(30); }

/// The processes that a start leads to, by pidfds.
struct Processes {
  base::UniqueFd manager;
  base::UniqueFd launcher;
  std::vector<base::UniqueFd> runners;
};
/// Opens them, and checks that none has mapped or opened anything in /dev/shm.
Processes processes_of(pid_t manager, const std::vector<pid_t>& runners);

/// Fails the test when there is no such process.
pid_t parent_of(pid_t pid);

/// Returns when all have ended. Fails the test when one does not by itself.
void expect_ended(const Processes& processes);

/// Orphans become children of this process (main() asks for it): reaps all that ended. Says if there is any
/// process of ours that did not, or something of ours in /dev/shm; empty: nothing.
std::string left_behind();
/// Fails the test if there is something.
void expect_nothing_left();

class StagedRun {
 public:
  explicit StagedRun(const Stage& stage) : StagedRun(staged_config(stage)) {}
  explicit StagedRun(const Config& config);
  /// Stops, and checks that nothing is left.
  ~StagedRun();
  StagedRun(const StagedRun&) = delete;
  StagedRun& operator=(const StagedRun&) = delete;

  Manager& manager() { return *manager_; }
  const Processes& processes() const { return processes_; }
  int runner(int rank) const { return processes_.runners.at(static_cast<std::size_t>(rank)).get(); }
  /// The master gradients, as they are now.
  std::vector<at::Tensor> gradients() const;

  /// On a thread of its own, so that the test can intervene.
  std::future<StepResult> step_in_background(const StepOptions& options = {});
  /// Returns when a runner waits for the next step.
  void wait_until_waiting(int rank) const { wait_until_in(rank, "waiting"); }
  /// Returns when a runner is in that phase.
  void wait_until_in(int rank, const std::string& phase) const;
  /// Returns when a runner is stopped by a signal.
  void wait_until_stopped(int rank) const;
  /// SIGSTOP to a runner; returns when it has stopped.
  void stop_and_wait(int rank) const;
  /// SIGKILL; returns when it is gone: the time of that.
  std::int64_t kill_and_wait(int pidfd) const;

 private:
  RunnerStatistics statistics_of(int rank) const;

  std::optional<Manager> manager_;
  Processes processes_;
};

/// Of the stage, where a lost runner is replaced at once.
Config restarting(const Stage& stage);

/// Gradients, and buffers, and where the data stands.
struct StagedOutcome {
  std::vector<at::Tensor> gradients, buffers;
  std::uint64_t elements = 0, steps = 0, samples = 0;
};
StagedOutcome outcome_of(StagedRun& run);
/// Of so many steps in which nothing happened.
StagedOutcome undisturbed(int steps);
/// Fails the test where a bit differs.
void expect_same(const StagedOutcome& a, const StagedOutcome& b);

/// A step that ended with `status`, did not count, and whose error has all `parts`.
void expect_failed(const StepResult& result, StepStatus status, std::initializer_list<std::string> parts);

/// `text` has all `parts`.
void expect_contains(const std::string& text, std::initializer_list<std::string> parts);

}  // namespace accelmgr::test
