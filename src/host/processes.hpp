// The processes behind a handle: manager, launcher, runners, as the host holds them.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "base/unique_fd.hpp"
#include "ipc/process.hpp"
#include "protocol/messages.hpp"

namespace accelmgr::host {

/// Owns the embedded manager process: it ends with this.
class Processes {
 public:
  /// Starts this program as the manager and waits for its answer. Throws what the manager could not go on
  /// from.
  static Processes start(const Config& config, std::vector<base::UniqueFd>& session_fds);
  Processes(Processes&&) = default;
  Processes& operator=(Processes&&) = default;

  bool manager_ended() const noexcept;
  bool launcher_ended() const noexcept;
  bool runner_ended(int rank) const noexcept;
  void kill_runner(int rank) const noexcept;
  int manager_pid() const noexcept { return manager_.pid; }

  /// SIGKILL to all of them; does not wait. Async-signal-safe.
  void kill() const noexcept;
  /// Waits until all have ended; what does not end by itself within the bound is killed. Returns how the
  /// manager ended.
  std::string end() noexcept;
  void ask_to_stop() const noexcept { protocol::send_stop(socket_.get()); }

 private:
  Processes() = default;
  base::UniqueFd socket_;
  ipc::Child manager_;
  pid_t launcher_pid_ = 0;
  base::UniqueFd launcher_pidfd_;
  std::vector<base::UniqueFd> runner_pidfds_;
};

}  // namespace accelmgr::host
