// The supervisor starts runners, watches runners and fork server, and replaces lost runners or leaves them
// out, as the configuration says. It works with any host and with none.
//
// clang-format off
//   | a rank is | state    | next                                                                           |
//   |-----------|----------|--------------------------------------------------------------------------------|
//   | wanted    | absent,  | starting: its backoff is over, there is a fork server, and (without a GPU)     |
//   |           | lost     | its turn to build has come                                                     |
//   | starting  | starting | ready: the runner said so;  lost: its process has ended                        |
//   | ready     | ready    | lost: its process has ended, by itself or killed by the watchdog               |
//   | lost      | lost     | wanted again (restart), out of the team (shrink), or given up (fail, limits)   |
//   | retiring  | retiring | absent: its process has ended;  wanted: the same, but it is in the team        |
// clang-format on
//
// Replicas are built one after the other: what the user's code downloads or holds in CPU memory meanwhile
// exists once. GPUs are opened, and memory is registered with them, while other ranks build. These are the
// parts of a start; only a rank with a GPU has those other than building:
//
// clang-format off
//   | part        | it ends when                                      | counts against start_timeout |
//   |-------------|---------------------------------------------------|------------------------------|
//   | opening     | the runner says "opened"                          | yes                          |
//   | waiting     | no other rank builds, and the turn is this rank's | no                           |
//   | building    | the runner says "built", or "ready" on the CPU    | yes                          |
//   | built       | the runner says "ready"                           | yes                          |
// clang-format on
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "base/clock.hpp"
#include "base/ipc/descriptor_watch.hpp"
#include "base/ipc/fork_server_client.hpp"
#include "base/unique_fd.hpp"
#include "engine/data/reading.hpp"
#include "engine/manager/driver.hpp"
#include "engine/manager/restart_policy.hpp"
#include "engine/manager/source_watch.hpp"
#include "engine/manager/watchdog.hpp"
#include "engine/protocol/messages.hpp"
#include "engine/session/parameter_update.hpp"
#include "engine/session/reduction.hpp"
#include "engine/session/session.hpp"
#include "engine/session/spans.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::manager {

using ipc::Watch;

/// How the replicas of the first team are built.
enum class StartOrder {
  by_rank,  ///< One after the other.
  at_once,  ///< All at the same time: they exist already.
};

/// Used by the thread of its loop. Does not block there, beyond the system calls that start a fork server and
/// give a slab its memory.
class Supervisor {
 public:
  using MakeForkServer = std::function<ipc::ForkServerClient()>;
  using Reading = std::function<std::optional<data::Reading>()>;
  using Clock = std::function<std::int64_t()>;

  /// `relaunch` makes a new fork server when the last one is lost. `reading` returns the read of the data
  /// source that is under way. `clock` is base::now_ns(); tests pass one of their own. `loop`, `config`,
  /// `manifest` and what `view` shows must outlive this.
  Supervisor(boost::asio::io_context& loop, const Config& config, const session::SupervisorView& view,
             const session::Manifest& manifest, ipc::ForkServerClient fork_server, MakeForkServer relaunch,
             Reading reading, Clock clock = base::now_ns);

  /// Starts the team, and goes on in the loop. Calls `ready` when all runners are ready. Until then the loop
  /// throws RunnerError when a runner or the fork server fails, or `start_timeout` has passed. Calls
  /// `gave_up` once when it will replace no more runners.
  void start(
      std::function<void()> ready, std::function<void()> gave_up = [] {},
      StartOrder order = StartOrder::by_rank);
  /// Whether all runners of the first team have been ready. Any thread.
  bool has_started() const noexcept { return has_started_; }
  /// See Watchdog::silent_ns(); of a runner that is ready. Any thread.
  std::int64_t silent_ns(int rank) const noexcept { return watchdog_.silent_ns(rank); }
  /// The fork server and the runners that are ready, for a host.
  protocol::Started started() const;

  /// From now on those who drive the session get a notice of each new runner and fork server.
  void report_to(std::vector<Driver*> drivers) noexcept { drivers_ = std::move(drivers); }
  /// Makes the ranks 0 to `ranks` - 1 the team.
  protocol::Resized resize(int ranks);
  /// Looks at processes and deadlines, as it does by itself every timing::supervisor_look_ns.
  void look();
  /// Call it when `config` has changed.
  void config_changed() { policy_.change(config_.runners); }
  /// Replaces the runner of a rank of the team, whatever `runners.on_loss` says. It may finish what it
  /// computes; a step that it leaves is tried again. Throws SessionError: it cannot be replaced now.
  void replace(int rank);

  /// Ends runners and fork server. Blocks: call it when the loop has ended. `patience_s`: how long runners
  /// may take to finish what they compute.
  void stop_runners(double patience_s);
  /// Ends them after an exception. Blocks as stop_runners() does.
  void end_runners() noexcept;

 private:
  enum class StartPart { none, opening, waiting, building, built };
  struct Runner {
    base::UniqueFd pidfd;
    base::UniqueFd lifeline;
    std::unique_ptr<Watch> says;
    StartPart part = StartPart::none;
    std::int64_t asked_ns = 0;   ///< When the fork server was asked for it.
    std::int64_t part_ns = 0;    ///< When the part of its start began.
    std::int64_t spent_ns = 0;   ///< Time of the earlier parts that count against start_timeout.
    bool is_ready = false;       ///< It said so.
    std::string verdict;         ///< Why it was ended or not started by the supervisor; else empty.
    std::int64_t killed_ns = 0;  ///< When it was killed or asked to retire; 0: neither.
    bool retiring = false;
  };
  struct Wanted {
    int rank;
    std::int64_t not_before_ns;
  };

  // Starting.
  void want(int rank, std::int64_t delay_ns);
  void start_next();
  void open_devices();
  bool has_device(int rank) const;
  void start_runner(int rank, StartPart part);
  void spawn(int rank);
  bool hear(int rank);
  void give_turn(int rank);
  void begin_part(int rank, StartPart part);
  std::int64_t start_took_ns(int rank) const;
  std::string phase_of_start(int rank) const;
  void not_started(int rank, const std::string& why);
  void ready_if_known(int rank);
  void tell_of_ready(int rank);
  void send_notices();
  void record_start(int rank);

  // Failure recovery (failure_recovery.cpp).
  void lost(int rank, int wait_status);
  void note_end(int rank, int wait_status);
  void finish_for(int rank);
  void finish_updates();
  void note_fork_server_loss();
  void relaunch();
  std::string why_it_recurs(int rank, session::Reason reason) const;
  Decision decide(int rank, session::Reason reason, bool with_another);
  void repair(int rank, const Decision& decision, const std::string& incident);
  std::string why_killed(int wait_status);
  /// Returns the incident as text.
  std::string record_incident(int rank, const std::string& phase, int pid, int wait_status,
                              const std::string& what);
  void give_up(const std::string& why);
  void end_runner(int rank, const std::string& why);

  // The team, and time.
  void watch_processes();
  void look_at_processes();
  void take(ipc::Started& started);
  void take(const ipc::Ended& ended);
  bool has_no_process(int rank) const noexcept;
  bool participant_is_gone(int rank) const noexcept;
  void retire(int rank, const char* why);
  void tick();
  void end_stuck(std::int64_t now_ns);
  void end_late_starts(std::int64_t now_ns);
  void end_late_start(int rank);
  std::string lateness(int rank) const;
  void stop_runners();

  Runner& runner(int rank) { return runners_[static_cast<std::size_t>(rank)]; }
  const Runner& runner(int rank) const { return runners_[static_cast<std::size_t>(rank)]; }
  std::uint64_t step_under_way() const noexcept;

  boost::asio::io_context& loop_;
  const Config& config_;
  session::SupervisorView view_;
  const session::Session& session_;
  const session::Manifest& manifest_;
  session::SpanWriter spans_;
  session::Reduction reduction_;
  session::ParameterUpdate update_;
  std::optional<ipc::ForkServerClient> fork_server_;
  MakeForkServer relaunch_;
  Clock clock_;
  std::function<void()> ready_, gave_up_;
  StartOrder order_ = StartOrder::by_rank;
  std::vector<Driver*> drivers_;

  boost::asio::steady_timer ticker_;
  std::unique_ptr<Watch> processes_watch_;
  std::vector<Runner> runners_;
  std::vector<std::int64_t> lost_ns_;  ///< Per rank: when the runner being replaced was lost; 0: none is.
  std::vector<Wanted> wanted_;  ///< Ranks that wait for their turn to build, in the order of their turns.
  std::atomic<bool> has_started_ = false;
  bool fork_server_lost_ = false;  ///< Its runners are ending; a new fork server is made when all have ended.
  std::int64_t start_deadline_ns_;
  RestartPolicy policy_;
  Watchdog watchdog_;
  Reading reading_;
  SourceWatch source_watch_;
  std::string last_exception_;    ///< What the last incident said.
  std::uint64_t oom_kills_seen_;  ///< See ipc::oom_kills().
};

}  // namespace accelmgr::manager
