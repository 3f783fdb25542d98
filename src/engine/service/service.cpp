#include "engine/service/service.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <chrono>
#include <filesystem>
#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/config/loader.hpp"
#include "base/exception_text.hpp"
#include "base/ipc/leftovers.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/user_forks.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/manager/chosen_devices.hpp"
#include "engine/manager/role.hpp"
#include "engine/service/handlers.hpp"
#include "engine/service/notify.hpp"
#include "engine/service/reload.hpp"
#include "engine/service/status.hpp"

namespace accelmgr::service {
namespace {

/// How long a host that makes no step may stay after the service has begun to end.
constexpr double idle_host_s = 2;

constexpr int exit_failed = 1, exit_usage = 2, exit_gave_up = 3;

/// Whether the configuration, or a file that it names, is wrong.
bool is_of_the_user(const std::exception& error) {
  return dynamic_cast<const ConfigError*>(&error) != nullptr ||
         dynamic_cast<const ModelError*>(&error) != nullptr ||
         dynamic_cast<const DataError*>(&error) != nullptr;
}

/// A directory of another run is a mistake in the configuration, which no restart mends.
void take_directory(client::Run& run, const std::string& directory) {
  try {
    run.take_directory(directory);
  } catch (const CheckpointError& error) {
    throw ConfigError(error.what(), "checkpoint.directory");
  }
}

}  // namespace

Service::Service(boost::asio::io_context& loop, const Config& config, const ServeOptions& options)
    : loop_(loop),
      options_(options),
      read_(config),
      path_(options.socket, options.group),
      token_(options.http.empty() ? std::nullopt : std::optional(Token::from_file(options.token_file))),
      tcp_(options.http.empty() ? std::nullopt : std::optional(listen_at(options.http))),
      self_(ipc::open_pidfd(getpid())),
      manager_(loop, manager::choose_devices(config),
               {.tenure = manager::Tenure::of_service, .ends_with = self_.get()}, listeners()),
      signals_(loop),
      timer_(loop),
      reload_timer_(loop),
      host_until_(base::Deadline::at_ns(0)),
      close_until_(base::Deadline::at_ns(0)) {}

std::vector<int> Service::listeners() const {
  std::vector<int> fds{path_.fd()};
  if (tcp_) fds.push_back(tcp_->fd.get());
  return fds;
}

void Service::begin(const std::function<void(const std::string&)>& say) {
  const auto& checkpoint = manager_.config().checkpoint;
  run_.emplace(checkpoint, /*lock_now=*/true);
  if (!checkpoint.directory.empty()) take_directory(*run_, checkpoint.directory);
  manager_.make_session(run_->resumed ? run_->resumed->path : "", [](const session::Session&, bool) {});
  if (run_->resumed) run_->resumed->tensors.clear();  // A host gets them from the file.
  driver_.emplace(loop_, manager_, run_->id);
  pending_steps_.emplace(*driver_);
  constexpr int handled[] = {SIGTERM, SIGINT, SIGHUP};
  for (const int number : handled) signals_.add(number);
  ipc::default_in_forks(handled);
  wait_for_signal();
  manager_.start({.ready = [this, say] { ready(say); },
                  .gave_up = [this] { act([this] { gave_up(); }); },
                  .freed =
                      [this] {
                        host_checkpoints_->left();
                        tell_clients([this] { events_->look(); });
                      },
                  .saved = [this](const protocol::Saved& saved) { host_checkpoints_->saved(saved); },
                  // It may have been removed. From now on the thread that writes checkpoints has `run_`.
                  .saves = [this] { run_->take_directory(manager_.config().checkpoint.directory); }});
  host_checkpoints_.emplace(loop_, manager_.lease());
  serve_clients();
}

void Service::serve_clients() {
  events_.emplace(clients_, manager_);
  const auto serve = [this](const Request& request, const Respond& respond) {
    handle(*this, request, respond);
  };
  server_.emplace(clients_, path_.take(), Access{options_.group}, options_.limits, serve);
  if (tcp_) tcp_server_.emplace(clients_, std::move(tcp_->fd), *token_, options_.limits, serve);
  std::thread([this] {
    prctl(PR_SET_NAME, "accelmgr:http");
    const auto work = boost::asio::make_work_guard(clients_);
    clients_.run();
  }).detach();
}

// The clients' thread may be in a call that does not return; then it is not waited for.
void Service::end_clients() {
  const auto ended = std::make_shared<std::promise<void>>();
  tell_clients([this, ended] {
    events_->look();  // The last step.
    server_.reset();
    tcp_server_.reset();
    ended->set_value();
  });
  ended->get_future().wait_for(std::chrono::seconds(1));
}

void Service::ready(const std::function<void(const std::string&)>& say) {
  if (closing_) return;
  const auto& config = manager_.config();
  notify(fmt::format("READY=1\nSTATUS=serves model '{}' with {} runners", config.model.kind, config.nprocs));
  say(fmt::format(
      "ready: model '{}', {} runners, process {}, socket {}{}{}", config.model.kind, config.nprocs, getpid(),
      options_.socket, tcp_ ? ", http://" + tcp_->address : "",
      run_->resumed ? fmt::format(", after step {} of '{}'", run_->resumed->step, run_->resumed->path) : ""));
  if (tcp_ && tcp_->others_reach_it)
    base::log().warn(
        "other machines can reach http://{}. A client that knows the token can stop this service; the token "
        "crosses the network without encryption",
        tcp_->address);
}

void Service::wait_for_signal() {
  signals_.async_wait([this](const boost::system::error_code& error, int number) {
    if (error) return;
    if (number == SIGHUP) {
      reload();
      return wait_for_signal();
    }
    if (closing_) {
      base::log().warn("a second signal ({}) ends the service at once", number);
      close_until_ = base::Deadline::at_ns(0);
      loop_.stop();
      return;
    }
    close(fmt::format("signal {}", number));
    wait_for_signal();
  });
}

// Only a service that starts again has runners again.
void Service::gave_up() {
  gave_up_ = true;
  close(why_not_ready(*this)->why);
}

void Service::reload() {
  if (options_.file.empty() || closing_ || !manager_.supervisor().has_started())
    return base::log().warn("SIGHUP: the configuration is not read again now");
  reload_when_idle();
}

// A thread reads the file, because a disk may block it. A request that drives the session reads the
// configuration on another thread.
void Service::reload_when_idle() {
  if (driver_->is_busy() || is_reading_) {
    reload_timer_.expires_after(std::chrono::nanoseconds(timing::look_ns));
    return reload_timer_.async_wait([this](const boost::system::error_code& error) {
      if (!error) reload_when_idle();
    });
  }
  const auto read = [this] {
    std::optional<Config> next;
    std::string why;
    try {
      next = read_again(options_.file, options_.settings);
    } catch (const std::exception& error) {
      why = error.what();
    }
    act([this, next, why] {
      is_reading_ = false;
      if (next) return apply(*next);
      base::log().error("SIGHUP: the configuration stays as it is: {}", why);
    });
  };
  try {
    std::thread(read).detach();
    is_reading_ = true;  // The thread's result comes through the loop of this one, so later.
  } catch (const std::system_error& error) {
    base::log().error("SIGHUP: the configuration stays as it is: no thread can read it: {}", error.what());
  }
}

void Service::apply(const Config& next) {
  if (driver_->is_busy()) return reload_when_idle();
  const auto reload = differences_of(read_, next);
  manager_.change([&](Config& config) { take_over(config, next); });
  if (next.nprocs != read_.nprocs && next.nprocs > 0)
    if (const auto answer = manager_.supervisor().resize(next.nprocs); !answer.refused.empty())
      base::log().warn("SIGHUP: the team stays as it is: {}", answer.refused);
  read_ = next;
  if (reload.changed.empty()) base::log().warn("SIGHUP: nothing changes");
  for (const auto& change : reload.changed) base::log().warn("SIGHUP: {}", change);
  for (const auto& change : reload.kept)
    base::log().warn("SIGHUP: {} needs another start of the service", change);
}

double Service::uptime_s() const noexcept { return timing::seconds(base::now_ns() - began_ns_); }

void Service::close(const std::string& why) {
  if (closing_.exchange(true)) return;
  base::log().info("the service ends: {}", why);
  notify("STOPPING=1");
  tell_clients([this, why] { events_->closing(why); });
  manager_.view().control().closing.store(1);
  manager_.view().wake_everyone();  // A host that waits for runners sees it.
  close_until_ = base::Deadline::in_seconds(options_.stop_timeout_s);
  host_until_ = host_leaves_until();
  look_at_end();
}

base::Deadline Service::host_leaves_until() const {
  return base::Deadline::in_seconds(std::min(idle_host_s, options_.stop_timeout_s / 2));
}

// Waits for the step under way, then for the checkpoints that were asked for, and for the host to leave. If
// the service ended before the host left, the host would lose what it has not saved.
void Service::look_at_end() {
  if (!manager_.supervisor().has_started()) return loop_.stop();
  const auto& lease = manager_.lease();
  if (!manager_.session().word().closed || driver_->is_busy() || lease.is_saving())
    host_until_ = host_leaves_until();
  const bool hosted = lease.state() != manager::Lease::State::free;
  const bool waits = lease.is_saving() || driver_->is_busy() || (hosted && !host_until_.passed());
  if (waits && !close_until_.passed()) {
    timer_.expires_after(std::chrono::nanoseconds(timing::look_ns));
    timer_.async_wait([this](const boost::system::error_code& error) {
      if (!error) look_at_end();
    });
    return;
  }
  save_and_stop();
}

void Service::save_and_stop() {
  const auto& session = manager_.session();
  const auto& lease = manager_.lease();
  const auto steps = session.counters(session.word().index).steps;
  // The checkpoint of a host has its optimizer, which one of the service would not have.
  const auto saved = lease.saved_step() ? *lease.saved_step() : run_->resumed ? run_->resumed->step : 0;
  if (is_saving_ || manager_.config().checkpoint.directory.empty() || steps == saved) return loop_.stop();
  if (lease.state() != manager::Lease::State::free || driver_->is_busy()) {
    base::log().warn("no checkpoint is written at the end: {} (pid {}) still drives the session",
                     lease.host().name, lease.host().pid);
    return loop_.stop();
  }
  std::string beside;  // What is half written takes the place of no good checkpoint.
  if (!lease.unfinished().empty()) {
    beside = std::filesystem::path(manager_.config().checkpoint.directory) / "half-written";
    base::log().warn("the last checkpoint is written to '{}': {}", beside, lease.unfinished());
  }
  is_saving_ = true;
  try {
    save_last(beside);
  } catch (const std::exception& error) {
    fail_last(error.what());
  }
}

void Service::fail_last(const std::string& why) {
  base::log().error("no checkpoint was written at the end: {}", why);
  failed_ = true;
  loop_.stop();
}

void Service::save_last(const std::string& directory) {
  const auto until = close_until_;
  driver_->run(
      [until, directory](Drive& drive) {
        drive.save(directory);
        const auto written = drive.checkpoints.written(until);
        if (written.empty()) throw CheckpointError("it was not written within --stop-timeout");
        if (!written.back().error.empty()) throw CheckpointError(written.back().error);
      },
      [this](const std::exception_ptr& thrown) {
        try {
          if (thrown) std::rethrow_exception(thrown);
          loop_.stop();
        } catch (...) {
          fail_last(base::current_exception_text());
        }
      });
}

int Service::end() {
  const bool had_started = manager_.supervisor().has_started();
  path_.remove();  // While it listens: no other service takes the path before.
  end_clients();
  manager_.stop(timing::runners_stop_s, [this] { return close_until_.passed(); });
  run_->lock.reset();
  if (!closing_ || !had_started || failed_) return exit_failed;
  return gave_up_ ? exit_gave_up : 0;
}

void Service::abandon() noexcept {
  path_.remove();
  manager_.abandon();
  if (run_) run_->lock.reset();
}

void serve(const Config& config, const ServeOptions& options,
           const std::function<void(const std::string&)>& say) {
  if (!manager::initialized()) throw UsageError("serve() was called without accelmgr::init()");
  config::validate(config);
  ipc::name_process("accelmgr:mgr");
  base::start_logging("service");
  ipc::survive_failed_writes();
  ipc::mark_descendants();
  // Neither is ever destroyed: other threads use them until the process ends.
  auto& loop = *new boost::asio::io_context;
  auto& service = *new Service(loop, config, options);
  int code = exit_failed;
  try {
    service.begin(say);
    loop.run();
    code = service.end();
  } catch (const std::exception& error) {
    fmt::print(stderr, "accelmgr: {}\n", error.what());
    code = is_of_the_user(error) ? exit_usage : exit_failed;
    service.abandon();
  }
  // Not ipc::exit_with_group(): the process group of a service may have been made by a shell, for a whole
  // pipeline.
  ipc::end_marked(ipc::own_mark(), base::Deadline::in_seconds(timing::group_end_s));
  _exit(code);
}

}  // namespace accelmgr::service
