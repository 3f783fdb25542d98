// The processes behind a handle: manager, launcher, runners, as the host holds them.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/manager.hpp"
#include "base/unique_fd.hpp"
#include "ipc/process.hpp"
#include "protocol/messages.hpp"
#include "session/step_word.hpp"

namespace accelmgr::host {

/// Owns the embedded manager process: it ends with this. Used by one thread.
class Processes {
 public:
  /// Takes the descriptors of a session that holds the initial parameters.
  using Prepared = std::function<void(std::vector<base::UniqueFd>)>;

  /// Starts a manager that makes a session, and waits until its runners are ready; `prepared` is called
  /// before there are any. Throws what the manager could not go on from; SessionError when it was
  /// interrupted.
  static Processes start(const Config& config, const StartOptions& options, const Prepared& prepared);
  /// Starts one that goes on with `session`.
  static Processes start_over(const Config& config, StartMethod method, const std::vector<int>& session);
  Processes(Processes&&) = default;
  Processes& operator=(Processes&&) = default;

  bool manager_ended() const noexcept;
  /// Returns sooner when it has ended, or is interrupted (base::interrupted()).
  void wait_until_manager_ended(base::Deadline deadline) const noexcept;
  bool runner_ended(int rank) const noexcept;
  /// Whether this process holds the pidfd of that generation of a rank: only then its end can be seen.
  bool holds(int rank, std::uint32_t generation) const noexcept;
  int manager_pid() const noexcept { return manager_.pid; }

  /// Throws SessionError when the manager is gone.
  void send(const protocol::Request& request) const;
  /// Takes in what the manager has said. Does not block. What this process has no descriptors for is left
  /// for a later call.
  void take_notices();
  /// Why something was left; empty: nothing was.
  const std::string& unread() const noexcept { return unread_; }
  /// Waits for the answer to Resize. Throws SessionError at the deadline, or when the manager is gone.
  protocol::Resized take_resized(base::Deadline deadline);
  /// The checkpoints that were written or failed since the last call, in order. Does not block.
  std::deque<protocol::Saved> take_saved();
  /// Blocks until the manager says something or has closed its socket: true; until the deadline, or until it
  /// is time to ask whether the wait is to be given up.
  bool hears_within(base::Deadline deadline) const noexcept;

  /// SIGKILL to manager and runners; does not wait. The launcher ends by itself then, and with it what this
  /// process does not know of. Async-signal-safe.
  void kill() const noexcept;
  /// Waits until all have ended; what does not end by itself within the bound is killed. Returns how the
  /// manager ended.
  std::string end() noexcept;
  void ask_to_stop() const noexcept;

 private:
  struct Runner {
    std::uint32_t generation = 0;
    base::UniqueFd pidfd;
  };
  Processes() : runners_(session::max_ranks) {}
  void make_manager(StartMethod method);
  void bring_up(const Config& config, const std::vector<int>& session, const StartOptions& options,
                const Prepared& prepared);
  protocol::Started receive_started(base::Deadline deadline, const std::function<bool()>& interrupted,
                                    const Prepared& prepared);
  void take_in(protocol::Notice notice);
  void take_in(protocol::Joined joined);

  base::UniqueFd socket_;
  ipc::Child manager_;
  base::UniqueFd manager_status_;  ///< From which its wait status is read, where another process reaps it.
  base::UniqueFd launcher_pidfd_;
  std::vector<Runner> runners_;  ///< By rank; never resized: kill() may interrupt anything.
  std::string unread_;
  std::deque<protocol::Resized> resized_;
  int late_resized_ = 0;  ///< Answers that nobody waits for any more.
  std::deque<protocol::Saved> saved_;
};

}  // namespace accelmgr::host
