#include "service_torture.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cmath>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/config/loader.hpp"
#include "engine/client/service_socket.hpp"
#include "engine/data/random.hpp"
#include "engine/support/expectations.hpp"
#include "role_process.hpp"
#include "service_run.hpp"
#include "temporary_folder.hpp"
#include "torture_course.hpp"
#include "tortured_host.hpp"

namespace accelmgr::test {
namespace {

constexpr double patience_s = 90;  // For the next step, while processes are stopped and start again.
constexpr gid_t hosts_group = 23456;
/// Both may use the service: one by its further group, one by its first.
constexpr HostUser other_users[] = {{.uid = 65534, .gid = 65534, .group = hosts_group},
                                    {.uid = 12345, .gid = hosts_group, .group = 12345}};

Config service_config(const ServiceTortureOptions& options, const TemporaryFolder& folder) {
  auto config = tortured_config(options.seed);
  config.faults = runner_faults(options.seed, options.steps, options.injected);
  // More of those that only a service finishes: a host waits for it, and leaves when it stands still.
  for (const char* phase : {"undo_saved", "in_flight", "chunk"})
    config.faults.push_back(fmt::format("rank=any generation=any phase={} probability={} fault=kill seed={}",
                                        phase,
                                        options.injected / 4 / double(options.steps) / tortured_ranks / 4,
                                        options.seed * 1000 + config.faults.size()));
  config.runners.reduction_timeout = 0.5;
  config.prefetch = 120;  // Some steps can be made while the service is stopped, whose loader is too.
  // Where the service and its fork server may both be killed, nobody is left who would end them.
  if (options.longest_life_s == 0) config.data.options[has_children] = "";
  if (options.longest_life_s > 0) {
    config.checkpoint.directory = folder / "checkpoints";
    config.checkpoint.resume = "latest";
  }
  return config;
}

class SharedBoard {
 public:
  SharedBoard() {
    void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw SystemError("mmap", errno);
    board_ = new (memory) Board;
  }
  ~SharedBoard() { munmap(board_, sizeof(Board)); }
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;
  Board& operator*() const noexcept { return *board_; }
  Board* operator->() const noexcept { return board_; }

 private:
  Board* board_;
};

/// Compares what hosts say with the undisturbed course. Throws Error when it differs.
class Referee {
 public:
  Referee(const Course& course, ServiceTortureReport& report) : course_(course), report_(report) {}

  /// A service has begun, after so many steps. What hosts of an earlier one still say does not matter any
  /// more.
  void begin(pid_t service, std::uint64_t steps) {
    if (steps > steps_)
      throw Error(fmt::format("the service goes on after step {}, and {} were made", steps, steps_));
    earlier_.insert(service_);
    service_ = service;
    steps_ = steps;
    lease_ = 0;
    leases_ = report_.leases;
  }

  void take(const Said& said) {
    if (said.what == Said::What::wrong) throw Error(said.text);
    if (said.service != service_) {
      if (!earlier_.contains(said.service))
        throw Error(fmt::format("the service is process {}, and was process {}", said.service, service_));
      if (said.what == Said::What::lost) ++report_.found["the end of the service"];
      return;
    }
    if (said.what == Said::What::attached)
      take_attached(said);
    else if (said.pid != driver_)
      throw Error(
          fmt::format("process {} works on the session while process {} drives it", said.pid, driver_));
    if (said.what == Said::What::stepped) take_step(said.state);
    if (said.what == Said::What::updated) {
      compare(said.state, course_.after(steps_), "the update after");
      is_updated_ = true;
    }
    if (said.what == Said::What::timed_out) ++report_.found["a step that timed out"];
    if (said.what == Said::What::stood_still)
      ++report_.found["a service that stood still in a committed step"];
    if (said.what == Said::What::lost) ++report_.found["the end of the service"];
  }

  std::uint64_t steps() const noexcept { return steps_; }
  bool is_over() const noexcept { return steps_ == course_.states.size() && is_updated_; }

 private:
  static void compare(const State& is, const State& expected, const char* when) {
    if (const auto differs = difference(is, expected); !differs.empty())
      throw Error(fmt::format("{} step {}: {}", when, expected.steps, differs));
  }

  void take_step(const State& state) {
    make_step();
    auto expected = course_.after(steps_);
    if (is_first_of_block(steps_)) expected.parameters = course_.after(steps_ - 1).parameters;
    compare(state, expected, "after");
  }

  void make_step() {
    report_.steps = ++steps_;
    ++report_.steps_made;
    is_updated_ = false;
  }

  void take_attached(const Said& said) {
    const auto& state = said.state;
    if (said.lease <= lease_)
      throw Error(fmt::format("lease {} was given after lease {}", said.lease, lease_));
    lease_ = said.lease;
    report_.leases = leases_ + lease_;
    driver_ = said.pid;
    if (state.steps == steps_ + 1) {
      ++report_.found["a step that its host has not seen"];
      make_step();
    } else if (state.steps != steps_) {
      throw Error(
          fmt::format("{} steps are committed, and {} were when a host said so last", state.steps, steps_));
    }
    compare(state, expected_when_attached(said), "a host attaches after");
    is_updated_ = said.left != LeftGradients::unapplied && !said.unfinished;
  }

  State expected_when_attached(const Said& said) {
    auto expected = course_.after(steps_);
    const bool within_block = !is_first_of_block(steps_);
    const auto check = [&](bool is_right) {
      if (!is_right)
        throw Error(fmt::format("a host attaches after step {} and is told: gradients {}, parameters {}",
                                steps_, static_cast<int>(said.left),
                                said.unfinished ? "half written" : "whole"));
    };
    if (steps_ == 0) {
      check(said.left == LeftGradients::none && !said.unfinished);
      ++report_.found["nothing"];
      return expected;
    }
    if (within_block) {
      check(said.left == LeftGradients::unapplied && !said.unfinished);
      ++report_.found["gradients of a block under way"];
      return expected;
    }
    switch (said.left) {
      case LeftGradients::unapplied:
        if (!said.unfinished) expected.parameters = course_.after(steps_ - 1).parameters;
        break;
      case LeftGradients::applied:
        if (is_zeroed_before(steps_)) expected.gradients = said.state.gradients;  // Some may be zeroed.
        break;
      case LeftGradients::none:
        check(is_zeroed_before(steps_) && !said.unfinished);
        expected.gradients = course_.begin.gradients;
        break;
    }
    if (said.unfinished) expected.parameters = said.state.parameters;  // The host has looked at them.
    ++report_.found[said.unfinished                         ? "half-written parameters"
                    : said.left == LeftGradients::unapplied ? "unapplied gradients"
                    : said.left == LeftGradients::applied   ? "applied gradients"
                                                            : "zeroed gradients"];
    return expected;
  }

  const Course& course_;
  ServiceTortureReport& report_;
  std::set<pid_t> earlier_;
  pid_t service_ = 0, driver_ = 0;
  std::uint64_t steps_ = 0, lease_ = 0;
  std::uint64_t leases_ = 0;  ///< Of earlier services.
  bool is_updated_ = false;   ///< Parameters are those after the last step.
};

/// The service, and two hosts at a time that wait for its lease.
class Arena {
 public:
  Arena(const ServiceTortureOptions& options, const Course& course, ServiceTortureReport& report)
      : options_(options),
        course_(course),
        report_(report),
        pipe_(make_pipe()),
        arguments_(arguments(folder_, options)),
        referee_(course, report) {
    if (geteuid() == 0) report.users = 1 + static_cast<int>(std::size(other_users));
    fcntl(pipe_.first.get(), F_SETFL, O_NONBLOCK);
    start_service();
  }

  ~Arena() {
    board_->over = true;
    for (auto& host : hosts_)
      if (host.pidfd) {
        ipc::send_signal(host.pidfd.get(), SIGKILL);
        waitpid(host.pid, nullptr, 0);
      }
    if (service_) kill_service();
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void disturb() {
    auto killer_options = options_.killer;
    killer_options.seed = options_.seed;
    Killer killer(killer_options);
    auto deadline = base::Deadline::in_seconds(patience_s);
    while (!referee_.is_over()) {
      if (service_dies_.passed()) {
        kill_service();
        listen();
        start_service();
      }
      for (auto& host : hosts_)
        if (!host.pidfd) start(host);
      const auto steps = referee_.steps();
      look();
      if (referee_.steps() > steps) deadline = base::Deadline::in_seconds(patience_s);
      if (deadline.passed())
        throw Error(fmt::format("no step for {} s after step {}: {}", patience_s, steps, status()));
    }
    board_->over = true;
    report_.killed = killer.end();
    deadline = base::Deadline::in_seconds(patience_s);
    while (hosts_[0].pidfd || hosts_[1].pidfd) {
      look();
      if (deadline.passed()) throw Error(fmt::format("a host has not ended: {}", status()));
    }
  }

  void end() {
    {
      const client::Handle manager(folder_ / "socket", {.name = "test", .timeout_s = patience_s});
      if (!same_bits(end_of(manager), course_.end)) throw Error("after the last step: not the same bits");
      const auto statistics = manager.statistics();
      report_.steps = statistics.steps;
      report_.losses = statistics.losses;
      ++report_.leases;
      if (statistics.manager_pid != service_->pid()) throw Error("another service has taken its place");
    }
    ipc::send_signal(service_->pidfd(), SIGTERM);
    const auto status = service_->status();
    service_.reset();
    if (status != 0) throw Error("the service: " + ipc::describe_exit(status));
    if (std::filesystem::exists(folder_ / "socket")) throw Error("the socket is left");
    for (std::size_t i = 0; i < host_ends; ++i)
      if (const int number = board_->ends[i]; number > 0)
        report_.ends[to_string(static_cast<HostEnd>(i))] = number;
    report_.checkpoints = board_->checkpoints;
    report_.found["another host that drove"] = board_->refused;
    report_.found["a service that did not answer"] = board_->unanswered;
    report_.found["no service"] = board_->unreached;
  }

 private:
  static std::vector<std::string> arguments(const TemporaryFolder& folder,
                                            const ServiceTortureOptions& options) {
    using std::filesystem::perms;
    std::vector<std::string> all{
        folder.write("config.yaml", config::to_yaml(service_config(options, folder))), folder / "socket"};
    if (geteuid() != 0) return all;
    permissions(folder.path(), perms::owner_all | perms::group_exec | perms::others_exec);
    all.push_back(std::to_string(hosts_group));
    return all;
  }

  /// The killer may end its runners while it starts: then it ends, and is started again.
  void start_service() {
    std::string line;
    for (int tries = options_.longest_life_s > 0 ? 20 : 1; tries > 0 && !line.starts_with("ready:");
         --tries) {
      if (service_) service_->status();
      service_.emplace(serves, arguments_);
      line = service_->line();
    }
    if (!line.starts_with("ready:")) throw Error("the service does not start: " + line);
    ++report_.services;
    referee_.begin(service_->pid(), nlohmann::json::parse(status()).at("steps"));
    if (options_.longest_life_s > 0)
      service_dies_ =
          base::Deadline::in_seconds(options_.longest_life_s * double(random_.below(1000)) / 1000);
  }

  void kill_service() {
    ipc::send_signal(service_->pidfd(), SIGKILL);
    service_->status();
    service_.reset();
  }

  void start(ipc::Child& host) {
    HostTask task{.folder = folder_.path(),
                  .course = course_,
                  .board = *board_,
                  .services_end = options_.longest_life_s > 0,
                  .says = pipe_.second.get(),
                  .seed = options_.seed,
                  .number = report_.hosts++,
                  .user = {}};
    const auto draw = random_.below(static_cast<std::uint64_t>(report_.users));
    if (draw > 0) task.user = other_users[draw - 1];
    host = ipc::fork_self([&] { live_as_host(task); });
  }

  /// Waits for what hosts say and for ends, for a second at most.
  void look() {
    std::array<pollfd, 4> waits{pollfd{.fd = pipe_.first.get(), .events = POLLIN, .revents = 0},
                                pollfd{.fd = service_->pidfd(), .events = POLLIN, .revents = 0},
                                pollfd{.fd = hosts_[0].pidfd.get(), .events = POLLIN, .revents = 0},
                                pollfd{.fd = hosts_[1].pidfd.get(), .events = POLLIN, .revents = 0}};
    if (poll(waits.data(), waits.size(), 1000) < 0 && errno != EINTR) throw SystemError("poll", errno);
    listen();
    if (ipc::has_ended(service_->pidfd())) {
      const auto how = ipc::describe_exit(service_->status());
      service_.reset();
      throw Error(fmt::format("the service has ended after step {}: {}", referee_.steps(), how));
    }
    for (auto& host : hosts_)
      if (ipc::has_ended(host.pidfd.get())) reap(host);
  }

  void reap(ipc::Child& host) {
    int status = ipc::unknown_exit;
    waitpid(host.pid, &status, 0);
    host.pidfd.reset();
    const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    if (signal == SIGALRM) ++report_.ends["by a timer"];
    if (status == 0 || signal == SIGALRM || signal == SIGKILL) return;
    listen();  // What it has said tells more than its exit code.
    throw Error(fmt::format("host {}: {}", host.pid, ipc::describe_exit(status)));
  }

  void listen() {
    for (Said said{}; read(pipe_.first.get(), &said, sizeof said) == sizeof said;) referee_.take(said);
  }

  std::string status() const {
    try {
      const auto deadline = base::Deadline::in_seconds(30);
      return client::ServiceSocket::connect(folder_ / "socket", deadline)
          .ask("GET", "/v1/status", "", "", deadline)
          .body;
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  const ServiceTortureOptions& options_;
  const Course& course_;
  ServiceTortureReport& report_;
  TemporaryFolder folder_;
  SharedBoard board_;
  std::pair<base::UniqueFd, base::UniqueFd> pipe_;
  std::vector<std::string> arguments_;
  std::optional<RoleProcess> service_;
  base::Deadline service_dies_ = base::Deadline::in_seconds(HUGE_VAL);
  Referee referee_;
  data::Random random_{options_.seed};
  ipc::Child hosts_[2];
};

}  // namespace

KillerOptions ServiceTortureOptions::gentle_to_services() {
  return {.seed = 0,
          .most = INT_MAX,
          .runners = 0.3,
          .fork_servers = 0.08,
          .managers = 0.06,
          .hosts = 0.58,
          .stops = 0.1,
          .longest_stop_s = 1.2,
          .longest_manager_stop_s = 6,
          .shortest_pause_s = 0.002,
          .longest_pause_s = 0.6};
}

int ServiceTortureReport::kills() const {
  int sum = number_of(killed) + number_of(injected);
  for (const auto& [how, number] : ends)
    if (how != to_string(HostEnd::exits) && how != to_string(HostEnd::detaches)) sum += number;
  return sum;
}

ServiceTortureReport service_torture(const ServiceTortureOptions& options) {
  ServiceTortureReport report;
  make_round(
      report, options.log_file,
      [&] { return undisturbed_course(tortured_config(options.seed), options.steps, /*keep_blocks=*/true); },
      [&](const Course& expected) {
        Arena arena(options, expected, report);
        arena.disturb();
        arena.end();
      });
  return report;
}

}  // namespace accelmgr::test
