// A service: a session with its runners that lives without a host, and its socket.
//
//   POST /v1/step  --->  HttpServer --> Handlers --> LocalDriver --+
//   GET /v1/attach --->                     |                      |   one of them drives
//   a host's steps:  no messages            +----> Lease <---------+
//
// The supervisor's thread has a loop of its own, and no client and no disk delays it: a second loop, on the
// clients' thread, reads requests, sends responses and events, and serves what only reads the session
// (Route::acts). Steps and checkpoints of the service itself run on threads of their own. It ends by a
// request, or by SIGTERM or SIGINT: the step under way is finished, a checkpoint is written if there is a
// directory for it, within `stop_timeout_s`; then the runners are stopped. A second signal ends it without
// waiting.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "base/clock.hpp"
#include "base/config/loader.hpp"
#include "base/unmovable.hpp"
#include "engine/client/checkpoints.hpp"
#include "engine/manager/manager.hpp"
#include "engine/service/events.hpp"
#include "engine/service/host_checkpoints.hpp"
#include "engine/service/http_server.hpp"
#include "engine/service/local_driver.hpp"
#include "engine/service/pending_steps.hpp"
#include "engine/service/socket_path.hpp"
#include "engine/service/tcp_listener.hpp"
#include "engine/service/token.hpp"

namespace accelmgr::service {

struct ServeOptions {
  std::string socket{};
  std::optional<gid_t> group{};  ///< Its members may use the service too.
  std::string http{};            ///< HOST:PORT to listen at too; empty: none.
  std::string token_file{};      ///< The file with the token that its clients must state.
  double stop_timeout_s = 20;
  // What SIGHUP reads again.
  std::string file{};
  std::vector<config::Setting> settings{};
  HttpLimits limits{};
};

/// Serves a session. Call it in a program that has called init(), while it has one thread. `say` gets a line
/// when the service is ready. Ends the process when the service ends, with exit code 0; 1 if it failed, also
/// to write its last checkpoint, or ended before it was ready; 2 if model or data cannot be made, or the
/// checkpoints are of another run; 3 if lost runners are not replaced any more. Throws ConfigError,
/// SystemError before it has started anything.
[[noreturn]] void serve(const Config& config, const ServeOptions& options,
                        const std::function<void(const std::string&)>& say);

/// Used by the thread of its loop, except for what is marked.
class Service : base::Unmovable {
 public:
  Service(boost::asio::io_context& loop, const Config& config, const ServeOptions& options);

  /// Makes the session, listens, and starts the runners. Blocks while the model and the data source are made.
  void begin(const std::function<void(const std::string&)>& say);
  /// Ends what the loop has served. Blocks. Returns the exit code.
  int end();
  /// Ends the runners after an exception. Blocks.
  void abandon() noexcept;

  /// Has `job` called by the thread of the loop, or by that of the clients. Any thread.
  void act(std::function<void()> job) { boost::asio::post(loop_, std::move(job)); }
  void tell_clients(std::function<void()> job) { boost::asio::post(clients_, std::move(job)); }

  // What handlers use. Those of the clients' thread: session, manifest and kinds of the manager, the standing
  // of its lease, run_id(), uptime_s(), is_closing(), events(), pending_steps().since().
  manager::Manager& manager() noexcept { return manager_; }
  LocalDriver& driver() noexcept { return *driver_; }
  PendingSteps& pending_steps() noexcept { return *pending_steps_; }
  HostCheckpoints& host_checkpoints() noexcept { return *host_checkpoints_; }
  Events& events() noexcept { return *events_; }
  const std::string& run_id() const noexcept { return run_->id; }
  double uptime_s() const noexcept;
  bool is_closing() const noexcept { return closing_; }
  /// Ends the service in an orderly way. `why` is for the log.
  void close(const std::string& why);

 private:
  std::vector<int> listeners() const;
  void serve_clients();
  void end_clients();
  void ready(const std::function<void(const std::string&)>& say);
  void wait_for_signal();
  base::Deadline host_leaves_until() const;
  /// Reads the configuration again.
  void reload();
  void reload_when_idle();
  void apply(const Config& next);
  void gave_up();
  void look_at_end();
  void save_and_stop();
  void save_last(const std::string& directory);
  void fail_last(const std::string& why);

  boost::asio::io_context& loop_;
  boost::asio::io_context clients_;
  ServeOptions options_;
  Config read_;  ///< What the last reading of the configuration gave.
  SocketPath path_;
  std::optional<Token> token_;
  std::optional<TcpListener> tcp_;
  base::UniqueFd self_;  ///< The pidfd of this process: fork servers end with it, as they do with a host.
  manager::Manager manager_;
  std::optional<client::Run> run_;
  std::optional<LocalDriver> driver_;
  std::optional<PendingSteps> pending_steps_;
  std::optional<HostCheckpoints> host_checkpoints_;
  std::optional<Events> events_;
  std::optional<HttpServer> server_, tcp_server_;
  boost::asio::signal_set signals_;
  boost::asio::steady_timer timer_, reload_timer_;
  std::int64_t began_ns_ = base::now_ns();
  std::atomic<bool> closing_ = false;
  bool is_reading_ = false;
  bool is_saving_ = false, failed_ = false, gave_up_ = false;
  base::Deadline host_until_, close_until_;
};

}  // namespace accelmgr::service
