// The supervisor: starts runners one after the other, watches over them, the launcher and the host, and does
// what the configuration says about those that are lost.
//
// clang-format off
//   | a rank is      | Life     | next                                                                                  |
//   |----------------|----------|---------------------------------------------------------------------------------------|
//   | wanted         | absent,  | starting: its turn has come, its backoff is over, there is a launcher                  |
//   |                | lost     |                                                                                       |
//   | starting       | starting | ready: it said so;  lost: its process has ended                                       |
//   | ready          | ready    | lost: its process has ended, by itself or ended by the watchdog                       |
//   | lost           | lost     | wanted again (restart), left out of the team (shrink), or the end (fail, limits)      |
//   | retiring       | retiring | absent: the team got smaller, its process has ended; wanted where the team grew again |
// clang-format on
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "data/reading.hpp"
#include "ipc/launcher.hpp"
#include "manager/restart_policy.hpp"
#include "manager/source_watch.hpp"
#include "manager/watch.hpp"
#include "manager/watchdog.hpp"
#include "protocol/messages.hpp"
#include "session/reduction.hpp"
#include "session/session.hpp"

namespace accelmgr::manager {

/// Used by the manager's main thread alone.
class Supervisor {
 public:
  using MakeLauncher = std::function<ipc::LauncherClient()>;
  using Save = std::function<void(protocol::Save)>;
  using Reading = std::function<std::optional<data::Reading>()>;

  /// `relaunch` makes a new launcher after the first was lost. `save` is given the host's requests to write a
  /// checkpoint. `reading` says what the data source is doing.
  Supervisor(const Config& config, const session::Session& session, const session::Manifest& manifest,
             ipc::LauncherClient launcher, MakeLauncher relaunch, Save save, Reading reading, int host_socket,
             int host_pidfd);

  /// Starts the team, answers the host when all are ready, then blocks until the host asks to stop or is
  /// gone; then ends the runners. Throws RunnerError when one fails before all are ready, SessionError on
  /// `start_timeout`.
  void run();

  bool host_gone() const noexcept;

  /// Any thread: tells the host, as soon as it reads.
  void tell_host(protocol::Notice notice);

 private:
  struct Runner {
    base::UniqueFd pidfd;
    base::UniqueFd lifeline;
    std::unique_ptr<Watch> end;
    std::unique_ptr<Watch> said_ready;
    std::string verdict;         ///< Why it was ended by us; empty: it was not.
    std::int64_t killed_ns = 0;  ///< When.
    bool retiring = false;
  };
  struct Wanted {
    int rank;
    std::int64_t not_before_ns;
  };

  void serve();

  // Starting.
  void want(int rank, std::int64_t delay_ns);
  void start_next();
  void start_runner(int rank);
  void spawn(int rank);
  void not_started(int rank, const std::string& why);
  void watch_runner(int rank);
  void runner_ready(int rank);
  void tell_of_ready(int rank);
  void answer_host();

  // Losing (losses.cpp).
  void runner_ended(int rank);
  void lost(int rank, int wait_status);
  void finish_for(int rank);
  void launcher_ended();
  void relaunch_when_all_are_gone();
  void repair(int rank, session::Reason reason, const std::string& incident);
  /// Returns it in words.
  std::string record_incident(int rank, int pid, int wait_status, const std::string& what);
  void give_up(const std::string& why);
  void end_runner(int rank, const std::string& why);

  void watch_launcher();

  // The host, and time.
  bool take_launcher_event(base::Deadline deadline);
  void take_launcher_events();
  void host_request();
  void resize(int ranks);
  bool has_no_process(int rank) const noexcept;
  void retire(int rank);
  void tick();
  void end_late_start(int rank);
  void send_notices();
  void stop_runners();

  /// More than a living launcher takes to reap; a dead one ends the wait.
  static constexpr double launcher_report_s = 1.0;

  Runner& runner(int rank) { return runners_[static_cast<std::size_t>(rank)]; }
  std::uint64_t step_under_way() const noexcept;

  const Config& config_;
  const session::Session& session_;
  session::Reduction reduction_;
  std::optional<ipc::LauncherClient> launcher_;
  MakeLauncher relaunch_;
  Save save_;
  int host_socket_;
  int host_pidfd_;

  boost::asio::io_context context_;
  boost::asio::steady_timer ticker_;
  boost::asio::steady_timer start_timer_;
  std::unique_ptr<Watch> host_socket_watch_, host_watch_, launcher_watch_, launcher_end_;
  std::vector<Runner> runners_;
  std::deque<Wanted> wanted_;
  std::optional<int> starting_;
  std::int64_t starting_ns_ = 0;  ///< Since when.
  bool answered_ = false;         ///< The host knows that all are ready.
  bool launcher_lost_ = false;    ///< Its runners are on their way out; a new one comes when they are gone.
  base::Deadline start_deadline_;
  RestartPolicy policy_;
  Watchdog watchdog_;
  Reading reading_;
  SourceWatch source_watch_;
  std::string last_exception_;            ///< What the last lost runner threw.
  std::deque<protocol::Notice> notices_;  ///< For which the host's socket had no room.
};

}  // namespace accelmgr::manager
