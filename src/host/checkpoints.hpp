// The host's side of checkpoints: a staging area from which the manager writes, and what a run goes on from.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/manager.hpp"
#include "base/unique_fd.hpp"
#include "checkpoint/lock.hpp"
#include "checkpoint/session_state.hpp"
#include "host/processes.hpp"
#include "ipc/memory.hpp"
#include "session/manifest.hpp"
#include "session/session.hpp"

namespace accelmgr::host {

/// The run that a manager belongs to.
struct Run {
  std::optional<checkpoint::DirectoryLock> lock;  ///< Of `checkpoint.directory`, if there is one.
  std::optional<Resumed> resumed;
  std::string id;

  /// Finds what the run goes on from; locks the directory first, if there is one and `lock_now`. A run that
  /// was killed before its first checkpoint begins anew, with its id. Throws CheckpointError.
  Run(const CheckpointConfig& config, bool lock_now);
  /// Throws CheckpointError unless the directory is this run's alone, from now on.
  void take_directory(const std::string& directory);

 private:
  bool alone_ = false;  ///< The directory holds no other run's.
};

/// Used by one thread.
class Checkpoints {
 public:
  Checkpoints(const Config& config, Run& run, const session::Session& session,
              const session::Manifest& manifest, Processes& processes)
      : config_(config), run_(run), session_(session), manifest_(manifest), processes_(processes) {}

  /// See Manager::save_checkpoint().
  double save(const CheckpointExtras& extras);
  /// See Manager::checkpoints_written().
  std::vector<CheckpointWritten> written(base::Deadline deadline);
  /// What is under way will never be told of.
  void manager_lost();

 private:
  /// Memory of one file's image, used again for the next checkpoint.
  struct Staging {
    base::UniqueFd fd;
    ipc::Mapping map;
    std::uint64_t fill(const std::vector<checkpoint::TensorBytes>& tensors);
    void reserve(std::uint64_t bytes);
  };
  void take_in();
  void wait_for_earlier();
  base::UniqueFd describe(const CheckpointExtras& extras, std::uint64_t model_bytes,
                          std::uint64_t training_bytes) const;

  const Config& config_;
  Run& run_;
  const session::Session& session_;
  const session::Manifest& manifest_;
  Processes& processes_;
  Staging model_, training_;
  std::optional<CheckpointWritten> under_way_;
  std::vector<CheckpointWritten> done_;
};

}  // namespace accelmgr::host
