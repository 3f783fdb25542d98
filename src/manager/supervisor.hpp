// The supervisor: starts the runners one after the other, then watches over them, the launcher and the host.
#pragma once

#include <memory>
#include <vector>

#include "accelmgr/config.hpp"
#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "ipc/launcher.hpp"
#include "session/reduction.hpp"
#include "session/session.hpp"

namespace accelmgr::manager {

/// Used by the manager's main thread alone.
class Supervisor {
 public:
  Supervisor(const Config& config, const session::Session& session, const session::Manifest& manifest,
             ipc::LauncherClient& launcher, int host_socket, int host_pidfd);

  /// Staged: a runner is forked when the one before is ready. Answers the host when all are. Throws
  /// RunnerError when one fails, SessionError on `start_timeout` and when the host is gone.
  void start_runners();

  /// Blocks until the host asks to stop, or is gone; then ends the runners.
  void run();

 private:
  struct Runner {
    pid_t pid = 0;
    base::UniqueFd pidfd;
    base::UniqueFd lifeline;
  };
  void start_runner(int rank, base::Deadline deadline);
  void take_launcher_events();
  bool take_launcher_event(base::Deadline deadline);
  void lost(int rank, int wait_status);
  void finish_for(int rank);
  bool host_gone() const noexcept;
  void stop_runners();

  const Config& config_;
  const session::Session& session_;
  session::Reduction reduction_;
  ipc::LauncherClient& launcher_;
  int host_socket_;
  int host_pidfd_;
  std::vector<Runner> runners_;
};

}  // namespace accelmgr::manager
