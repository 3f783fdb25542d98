// A supervisor with a clock that the test sets, and a fork server that the test plays: no process is started.
// The end of a process is a socket that becomes readable, as its pidfd would.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <boost/asio/io_context.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/ipc/fork_server_messages.hpp"
#include "base/ipc/socket.hpp"
#include "base/timing.hpp"
#include "engine/manager/supervisor.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/reduction.hpp"
#include "engine/session/session_support.hpp"
#include "engine/session/stored_text.hpp"

namespace accelmgr::manager::test {

inline std::int64_t ns(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

/// Stands for a process. What it was sent by its pidfd does nothing.
class Process {
 public:
  Process() { std::tie(pidfd_, end_) = ipc::socket_pair(); }
  base::UniqueFd pidfd() const { return base::duplicate(pidfd_.get()); }
  void end() { end_.reset(); }

 private:
  base::UniqueFd pidfd_, end_;
};

/// What a supervisor asks for, and what a fork server answers.
class PlayedForkServer {
 public:
  using Report = ipc::fork_server::Report;
  struct Runner {
    std::uint32_t generation = 0;
    pid_t pid = 0;
    base::UniqueFd lifeline;
    Process process;
  };

  ipc::ForkServerClient client() {
    auto [ours, theirs] = ipc::socket_pair();
    socket_ = std::move(ours);
    return {std::move(theirs), ipc::Child{most_pids, process_.pidfd()}};
  }
  /// Takes the next request. Returns the rank that is asked for; nullopt: there is no request.
  std::optional<int> take_request() {
    if (!ipc::is_readable(socket_.get())) return std::nullopt;
    auto message = ipc::receive(socket_.get(), base::Deadline::at_ns(0)).value();
    const auto request = ipc::fork_server::packet_of<ipc::fork_server::Request>(message.bytes);
    EXPECT_EQ(request.kind, ipc::fork_server::Request::Kind::spawn);
    auto& runner = runners[request.rank] = {};
    runner.generation = request.generation;
    runner.lifeline = std::move(message.fds.back());
    return request.rank;
  }
  void fork(int rank) {
    auto& runner = runners.at(rank);
    runner.pid = ++last_pid_;
    const int pidfd[] = {runner.process.pidfd().release()};
    report({Report::Kind::started, rank, runner.generation, runner.pid, 0, 0, 1}, pidfd);
    close(pidfd[0]);
  }
  void refuse(int rank, int error) {
    report({Report::Kind::ended, rank, runners.at(rank).generation, 0, W_EXITCODE(ipc::exit_not_forked, 0),
            error, 1});
  }
  /// Says any bytes, also none and more than a packet may have.
  void say(int rank, const std::string& bytes) {
    const int lifeline = runners.at(rank).lifeline.get();
    EXPECT_EQ(::send(lifeline, bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
  }
  /// Whether the runner was told that its turn to build has come, since the last call.
  bool may_build(int rank) {
    const int lifeline = runners.at(rank).lifeline.get();
    return ipc::is_readable(lifeline) && ipc::receive(lifeline, base::Deadline::at_ns(0)).has_value();
  }
  /// The runner ends, and the fork server says how.
  void end(int rank, int wait_status) {
    auto& runner = runners.at(rank);
    runner.process.end();
    report_end(rank, runner.generation, runner.pid, wait_status);
  }
  void report_end(int rank, std::uint32_t generation, pid_t pid, int wait_status) {
    report({Report::Kind::ended, rank, generation, pid, wait_status, 0, 1});
  }
  /// The fork server ends. Its runners end when the test says so.
  void die() {
    socket_.reset();
    process_.end();
  }

  void end_all() {
    die();
    for (auto& [rank, runner] : runners) runner.process.end();
  }

  std::map<int, Runner> runners;  ///< The last one that was asked for of each rank.

 private:
  static constexpr pid_t most_pids = 4'194'304;  // More than the kernel gives: a signal reaches nobody.
  void report(const Report& report, std::span<const int> fds = {}) {
    ipc::send(socket_.get(), ipc::fork_server::bytes_of(report), fds);
  }
  base::UniqueFd socket_;
  Process process_;
  inline static pid_t last_pid_ = most_pids;
};

class Supervised : public testing::Test {
 protected:
  explicit Supervised(int ranks = 2) : Supervised(ranks, session::small_session(ranks, {64})) {}
  Supervised(int ranks, session::SmallSession small) : small_(std::move(small)), view_(small_.session) {
    config_.nprocs = ranks;
    config_.start_timeout = 60;
    config_.runners.on_loss = LossPolicy::restart;
    config_.runners.restart_window = 600;
    config_.runners.restarts_per_window = 100;
    config_.runners.max_restarts = 100;
    config_.runners.restart_backoff = 4;
    view_.control().team.store(session::all_ranks(ranks));
  }

  void TearDown() override {
    for (auto& server : servers_) server->end_all();
  }

  void make() {
    supervisor_.emplace(
        loop_, config_, view_, small_.manifest, new_fork_server().client(),
        [this] { return new_fork_server().client(); }, [] { return std::nullopt; },
        [this] { return now_ns_; });
    supervisor_->start([this] { ready_ = true; }, [this] { gave_up_ = true; });
  }
  /// Starts the runners that are asked for until none is.
  void start_runners() {
    while (const auto rank = server().take_request()) start_runner(*rank);
  }
  void start_runner(int rank) {
    server().fork(rank);
    say(rank, "ready");
  }
  /// Forks the runners that are asked for. Returns them in the order of the requests.
  std::vector<int> fork_all() {
    std::vector<int> ranks;
    while (const auto rank = server().take_request()) {
      server().fork(*rank);
      ranks.push_back(*rank);
    }
    run();
    return ranks;
  }
  void say(int rank, const std::string& what) {
    server().say(rank, what);
    run();
  }
  void end(int rank, int wait_status = SIGKILL) {
    server().end(rank, wait_status);
    run();
  }
  /// The next runner that is asked for is this one, and starts.
  void expect_start(int rank) {
    ASSERT_EQ(server().take_request(), rank);
    start_runner(rank);
  }
  void start_team() {
    make();
    start_runners();
    ASSERT_TRUE(ready_);
  }
  /// Handles what has come.
  void run() {
    loop_.restart();
    loop_.poll();
  }
  /// Lets time pass, and the supervisor look.
  void after(double seconds) {
    now_ns_ += ns(seconds);
    supervisor_->look();
    run();
  }

  /// As after(), with a look as often as a supervisor does by itself.
  void watch(double seconds) {
    for (const auto end = now_ns_ + ns(seconds); now_ns_ < end;)
      after(timing::seconds(timing::supervisor_look_ns));
  }
  /// All ranks vote for an attempt. None has reduced its slice.
  std::uint64_t commit() {
    const auto team = control().team.load();
    const auto attempt = session::open_attempt(
        small_.session, {.participants = team, .shares = session::even_shares(1), .batch_size = 4});
    session::Reduction reduction(small_.session, small_.manifest);
    for (int rank = 0; rank < small_.session.ranks(); ++rank) {
      for (auto& tag : small_.session.tags(rank)) tag.store(attempt);
      for (float& value : session::slab_of(small_.session, rank)) value = static_cast<float>(rank + 1);
      reduction.reset_cursor(rank, attempt);
      small_.session.record(rank).ballot.micro_batches = 1;
      session::cast_vote({small_.session, rank}, attempt);
    }
    EXPECT_TRUE(small_.session.word().committed(team));
    return attempt;
  }

  void finish_slices(std::uint64_t attempt) {
    session::Reduction reduction(small_.session, small_.manifest);
    for (int rank = 0; rank < small_.session.ranks(); ++rank) reduction.finish_slice(rank, attempt);
  }

  PlayedForkServer& server() { return *servers_.back(); }
  session::RunnerState state(int rank) const { return small_.session.record(rank).state.load(); }
  const session::Control& control() const { return std::as_const(small_.session).control(); }
  std::uint64_t incidents() const { return control().incidents.load(); }
  std::uint64_t replacements() const { return control().replacements.load(); }
  const session::Incident& last_incident() const {
    return std::as_const(small_.session).incident(incidents());
  }
  std::string last_loss() const { return session::text_of(last_incident().what); }
  std::string given_up_why() const { return session::text_of(control().given_up_why); }

  std::int64_t now_ns_ = ns(1000);
  Config config_;
  boost::asio::io_context loop_;
  session::SmallSession small_;
  session::SupervisorView view_;
  std::vector<std::unique_ptr<PlayedForkServer>> servers_;
  std::optional<Supervisor> supervisor_;
  bool ready_ = false, gave_up_ = false;

 private:
  PlayedForkServer& new_fork_server() {
    servers_.push_back(std::make_unique<PlayedForkServer>());
    return *servers_.back();
  }
};

}  // namespace accelmgr::manager::test
