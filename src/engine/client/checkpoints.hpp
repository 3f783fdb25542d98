// The host's side of checkpoints: the staging area from which the manager writes them, and the checkpoint
// that a run goes on from.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/checkpoint.hpp"
#include "accelmgr/config.hpp"
#include "base/ipc/memory.hpp"
#include "base/unique_fd.hpp"
#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/lock.hpp"
#include "engine/checkpoint/session_state.hpp"
#include "engine/client/link.hpp"
#include "engine/client/values.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/session.hpp"
#include "engine/session/spans.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::client {

/// What a host has saved with a checkpoint. Throws CheckpointError.
ResumedFrom resumed_from(const checkpoint::HostFiles& files);

/// The run that a manager belongs to.
struct Run {
  std::optional<checkpoint::DirectoryLock> lock;  ///< The lock of the checkpoint directory, once taken.
  std::optional<ResumedFrom> resumed;
  std::string id;

  /// Finds the checkpoint that the run goes on from. Later ones that cannot be read get another name
  /// (checkpoint::set_unreadable_aside()) when the directory is locked. Locks `checkpoint.directory` before
  /// that, if there is one and `lock_now` is true. If there is no checkpoint yet because the run was killed
  /// before its first one, it begins anew under its old id; that needs the lock. Throws CheckpointError.
  Run(const CheckpointConfig& config, bool lock_now);
  /// The run of an earlier manager of this process, which has ended; or that of a service, which locks the
  /// directory itself.
  explicit Run(std::string of, protocol::Tenure tenure = protocol::Tenure::of_host)
      : id(std::move(of)), tenure_(tenure) {}
  /// Locks `directory` for this run, if it is not locked yet, or was removed since. Throws CheckpointError
  /// when another run has locked it, or when it holds checkpoints of another run.
  void take_directory(const std::string& directory);

 private:
  void set_unreadable_aside();

  protocol::Tenure tenure_ = protocol::Tenure::of_host;
  bool alone_ = false;  ///< The directory was found to hold no checkpoints of another run.
  std::vector<std::filesystem::path> unreadable_;  ///< Later checkpoints than that of `resumed`.
};

/// Used by one thread.
class Checkpoints {
 public:
  Checkpoints(const Config& config, Run& run, const session::HostView& view,
              const session::Manifest& manifest, Link& link)
      : config_(config),
        run_(run),
        session_(view.session()),
        spans_(view.spans()),
        manifest_(manifest),
        link_(link) {}

  /// See Manager::save_checkpoint().
  double save(const Extras& extras);
  /// For a service, which has no optimizer: with what the last host has saved in `files` (null: nothing), so
  /// that the next one finds it.
  double save_with(const checkpoint::HostFiles* files, const std::string& directory);
  /// See Manager::checkpoints_written().
  std::vector<CheckpointWritten> written(base::Deadline deadline);
  /// Blocks until no checkpoint is under way. Throws SessionError when the wait is interrupted.
  void finish(base::Deadline deadline);
  /// Marks the checkpoint under way as failed, for that reason: its manager is gone.
  void manager_lost(const std::string& why = "the manager process ended before the checkpoint was written");

 private:
  /// Memory for the image of one file. Reused by the next checkpoint.
  struct Staging {
    base::UniqueFd fd;
    ipc::Mapping map;
    std::uint64_t fill(const std::vector<checkpoint::TensorBytes>& tensors);
    void reserve(std::uint64_t bytes);
  };
  void take_in();
  void wait_for_earlier();
  base::UniqueFd describe(const Extras& extras, std::uint64_t model_bytes,
                          std::uint64_t training_bytes) const;

  const Config& config_;
  Run& run_;
  const session::Session& session_;
  session::SpanWriter spans_;
  const session::Manifest& manifest_;
  Link& link_;
  Staging model_, training_;
  std::optional<CheckpointWritten> under_way_;
  std::vector<CheckpointWritten> done_;
};

}  // namespace accelmgr::client
