// The host's side of checkpoints: a staging area from which the manager writes, and what a run goes on from.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/manager.hpp"
#include "base/unique_fd.hpp"
#include "checkpoint/session_state.hpp"
#include "host/processes.hpp"
#include "ipc/memory.hpp"
#include "session/manifest.hpp"
#include "session/session.hpp"

namespace accelmgr::host {

/// The checkpoint that `config` asks to go on from, wholly checked; none for a new run. `latest` of a
/// directory that has none begins a new run. Throws CheckpointError.
std::optional<Resumed> find_resumed(const CheckpointConfig& config);

/// Used by one thread.
class Checkpoints {
 public:
  Checkpoints(const Config& config, const session::Session& session, const session::Manifest& manifest,
              Processes& processes)
      : config_(config), session_(session), manifest_(manifest), processes_(processes) {}

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

  const Config& config_;
  const session::Session& session_;
  const session::Manifest& manifest_;
  Processes& processes_;
  Staging model_, training_;
  std::optional<CheckpointWritten> under_way_;
  std::vector<CheckpointWritten> done_;
};

}  // namespace accelmgr::host
