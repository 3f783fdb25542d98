// A manager with its runners on a stage, and what tests ask about their processes.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "base/ipc/process.hpp"
#include "base/unique_fd.hpp"
#include "engine/client/handle.hpp"
#include "engine/support/expectations.hpp"
#include "stage.hpp"
#include "support.hpp"

namespace accelmgr::test {

/// Pidfds of the processes of a run.
struct Processes {
  base::UniqueFd manager;
  base::UniqueFd fork_server;
  std::vector<base::UniqueFd> runners;
};
/// Opens the pidfds, and checks that no process has mapped or opened anything in /dev/shm.
Processes processes_of(pid_t manager, const std::vector<pid_t>& runners);

/// The number of that name in a `status` of /proc.
std::optional<std::int64_t> status_number(const std::filesystem::path& status, const std::string& name);

/// Fails the test if there is no such process.
pid_t parent_of(pid_t pid);

/// Returns when all processes have ended. Fails the test if one does not end by itself.
void expect_ended(const Processes& processes);

class StagedRun {
 public:
  explicit StagedRun(const Stage& stage) : StagedRun(staged_config(stage)) {}
  explicit StagedRun(const Config& config);
  /// Stops the manager, and checks that nothing is left.
  ~StagedRun();
  StagedRun(const StagedRun&) = delete;
  StagedRun& operator=(const StagedRun&) = delete;

  client::Handle& manager() { return *manager_; }
  const Processes& processes() const { return processes_; }
  int runner(int rank) const { return processes_.runners.at(static_cast<std::size_t>(rank)).get(); }
  /// A copy of the master gradients.
  Tensors gradients() const { return gradients_of(*manager_); }

  /// Makes a step on another thread, so that the test can intervene.
  std::future<StepResult> step_in_background(const StepOptions& options = {});
  /// Returns when a runner waits for the next step.
  void wait_until_waiting(int rank) const { wait_until_in(rank, "waiting"); }
  /// Returns when a runner is in that phase.
  void wait_until_in(int rank, const std::string& phase) const;
  /// Returns when a signal has stopped the runner.
  void wait_until_stopped(int rank) const;
  /// Sends SIGSTOP to the runner, and returns when it has stopped.
  void stop_and_wait(int rank) const;
  /// Sends SIGKILL. Returns the time at which the process had ended.
  std::int64_t kill_and_wait(int pidfd) const;

 private:
  RunnerStatistics statistics_of(int rank) const;

  std::optional<client::Handle> manager_;
  Processes processes_;
};

/// A run that has made one step.
class RunAfterOneStep : public StagedRun {
 public:
  template <class StageOrConfig>
  explicit RunAfterOneStep(const StageOrConfig& of) : StagedRun(of) {
    expect_ok(manager());
    gradients_ = gradients();
  }
  /// Whether the gradients are those of the first step, bit for bit.
  bool has_added_nothing() const { return same_bits(gradients(), gradients_); }

 private:
  Tensors gradients_;
};

/// A staged config in which a lost runner is replaced at once.
Config restarting(const Stage& stage);

/// Gradients, buffers, and the position in the data.
struct StagedOutcome {
  Tensors gradients, buffers;
  std::uint64_t elements = 0, steps = 0, samples = 0;
};
StagedOutcome outcome_of(StagedRun& run);
/// The outcome of `steps` steps without a fault.
StagedOutcome undisturbed(int steps);
/// Fails the test if a bit differs.
void expect_same(const StagedOutcome& a, const StagedOutcome& b);

}  // namespace accelmgr::test
