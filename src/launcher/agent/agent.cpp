#include "launcher/agent/agent.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/errno_text.hpp"
#include "base/ipc/network.hpp"
#include "base/ipc/process.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "launcher/agent/report_file.hpp"
#include "launcher/collective/shm/factory.hpp"
#include "launcher/distributed/store/tcp_store.hpp"
#include "launcher/launch/plan/variables.hpp"
#include "launcher/launch/serial/serial_memory.hpp"

namespace accelmgr::agent {
namespace {

constexpr double stop_s = 3;           // For the fork server to end, when no process is left.
constexpr double leaving_s = 5;        // For the agents to leave the store.
constexpr double interrupted_s = 0.5;  // The same after a signal: the user waits for the end.
constexpr int exit_lost = 1;
// The ranks decide what these mean. The program ends when they do.
constexpr std::array passed_on = {SIGUSR1, SIGUSR2, SIGALRM, SIGWINCH, SIGPWR};

std::chrono::nanoseconds seconds(double s) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(s * 1e9));
}

std::string name_of_signal(int number) {
  const auto name = ipc::signal_name(number);
  return !name.empty() ? fmt::format("SIG{}", name) : fmt::format("signal {}", number);
}

std::string processes(int count) { return fmt::format("{} process{}", count, count == 1 ? "" : "es"); }

bool same_process(const Failure& a, const Failure& b) {
  return a.rank == b.rank && a.node_rank == b.node_rank && a.pid == b.pid;
}

}  // namespace

Agent::Agent(AgentOptions options, launch::NodeInfo node_info)
    : options_(std::move(options)), node_info_(std::move(node_info)), signals_(loop_), timer_(loop_) {
  spec_ = launch::resolve(options_.launch, node_info_);
  for (const auto& warning : spec_.warnings) base::log().warn("{}", warning);
  if (!options_.log_directory.empty()) make_log_folder(options_.log_directory);
}

Agent::Result Agent::run() {
  // Fork the fork server first: this process still has one thread, and no descriptors that children must not
  // get.
  auto spawner = spec_.start_method == StartMethod::forkserver ? launch::Spawner::from_zygote()
                                                               : launch::Spawner::fork();
  ranks_ = std::make_unique<LocalRanks>(
      loop_, std::move(spawner), terminal_,
      LocalRanks::Settings{options_.program, options_.prefix, options_.log_directory},
      LocalRanks::Events{[this](int rank) { rank_ended(rank); },
                         [this](const std::string& how) { fork_server_ended(how); }});
  remove_report(options_.log_directory);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) signals_.add(number);
  for (const int number : passed_on) signals_.add(number);
  watch_signals();
  open_store();
  loop_.run();
  ranks_->stop(base::Deadline::in_seconds(stop_s));
  const bool clean = link_->close(base::Deadline::in_seconds(signal_ != 0 ? interrupted_s : leaving_s));
  if (problem_) {
    terminal_.flush(base::Deadline::in_seconds(stop_s));
    std::rethrow_exception(problem_);
  }
  // Wait for the reader of the output, but only shortly after a signal.
  signals_.clear();
  terminal_.flush(base::Deadline::in_seconds(signal_ != 0 ? interrupted_s : 1e9));
  if (const int code = terminal_.error(); code != 0) {
    say(fmt::format("accelmgr: standard output could not be written: {}", base::errno_text(code)));
    terminal_.flush(base::Deadline::in_seconds(stop_s));
    if (exit_code_ == 0) exit_code_ = exit_lost;
  }
  return {exit_code_, clean};
}

// ---- Starting ----

void Agent::open_store() {
  NodeLink::OpenStore open;
  if (spec_.node_rank == 0) {
    auto socket = ipc::bind_tcp(spec_.master_addr, spec_.master_port);
    spec_.master_port = ipc::bound_port(socket.get());
    auto shared = std::make_shared<base::UniqueFd>(std::move(socket));
    open = [shared] { return distributed::TcpStore::serve(std::move(*shared)); };
  } else {
    open = [host = spec_.master_addr, port = spec_.master_port, timeout_s = options_.rendezvous_timeout_s] {
      return distributed::TcpStore::connect(host, port, base::Deadline::in_seconds(timeout_s));
    };
  }
  Node self{.nnodes = spec_.nnodes,
            .min_nodes = options_.min_nodes > 0 ? options_.min_nodes : spec_.nnodes,
            .node_rank = spec_.node_rank,
            .nprocs = spec_.nprocs,
            .max_restarts = options_.max_restarts,
            .backend = spec_.backend,
            .hostname = node_info_.hostname,
            .pid = getpid()};
  NodeEvents events{.met = [this](World world) { met(std::move(world)); },
                    .outcome = [this](Nodes::Outcome o) { outcome(std::move(o)); },
                    .all_ended = [this](const EndedNode& all) { all_ended(all); },
                    .broken = [this](const std::exception_ptr& error) { broken(error); }};
  link_ = std::make_unique<NodeLink>(loop_, std::move(open), std::move(self), options_.rendezvous_timeout_s,
                                     std::move(events));
}

void Agent::watch_signals() {
  signals_.async_wait([this](const boost::system::error_code& error, int number) {
    if (error) return;
    signalled(number);
    if (state_ != State::over) watch_signals();
  });
}

std::map<std::string, std::string> Agent::environment() const {
  std::map<std::string, std::string> added{
      {launch::variable::agent_store, "True"},
      {launch::variable::restart_count, std::to_string(attempt_)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options_.max_restarts)},
      {"TORCHELASTIC_RUN_ID", options_.run_id.empty() ? world_->run_id : options_.run_id},
      {launch::variable::serial_memory, launch::serial_memory_path()},
  };
  if (world_memory_)
    added[launch::variable::world_memory] = fmt::format("/proc/{}/fd/{}", getpid(), world_memory_.get());
  return added;
}

void Agent::start_attempt() {
  outcome_.reset();
  own_.reset();
  ended_ = {};
  ended_of_itself_.clear();
  asked_ = killed_ = false;
  state_ = State::running;
  try {
    // An elastic world may have more nodes than that of the attempt before.
    world_memory_ = spec_.nnodes == 1 && spec_.backend == "shm"
                        ? collective::shm::create_world(spec_.world_size)
                        : base::UniqueFd();
    ranks_->start(spec_, node_info_, ports_, {attempt_, environment()});
  } catch (const Error& error) {
    // Reported as a failure of this node, so that the other nodes learn the cause.
    fail(own_failure(error.what()));
  }
}

// ---- Events ----

void Agent::met(World world) {
  if (state_ != State::meeting && state_ != State::beginning) return;
  timer_.cancel();
  world_ = std::move(world);
  attempt_ = world_->attempt;
  try {
    auto launch = options_.launch;
    if (launch.nnodes > 0) {
      launch.nnodes = static_cast<int>(world_->nodes.size());
      launch.node_rank = world_->node_rank;
    }
    launch.world_size = world_->size();
    launch.rank_offset = world_->rank_offset(world_->node_rank);
    const auto port = std::exchange(spec_, launch::resolve(launch, node_info_)).master_port;
    spec_.master_port = port;
    ports_ = launch::bind_worker_ports(spec_, node_info_);
  } catch (const Error&) {
    problem_ = std::current_exception();
    return finish(exit_lost);
  }
  start_attempt();
}

void Agent::rank_ended(int local_rank) {
  const bool failed = !ranks_->has_succeeded(local_rank);
  if (state_ == State::running && failed) return fail(ranks_->failure_of(local_rank));
  if (state_ == State::running && ranks_->running() == 0) link_->done();
  if (state_ == State::ending && failed && (!asked_ || ended_of_itself_.contains(local_rank)))
    ended_.later.push_back(ranks_->failure_of(local_rank));
  if_all_have_ended();
}

void Agent::fork_server_ended(const std::string& how) {
  if (state_ == State::over) return;
  if (state_ == State::meeting || world_ == std::nullopt) {
    problem_ = std::make_exception_ptr(SessionError("the fork server of the processes ended: " + how));
    return finish(exit_lost);
  }
  // All processes have ended with the fork server, and none can be started without it: no restart.
  auto why = own_failure("the fork server of the processes ended: " + how);
  link_->stop(why);
  outcome({Nodes::Outcome::Kind::stopped, std::move(why)});
}

void Agent::outcome(Nodes::Outcome outcome) {
  using Kind = Nodes::Outcome::Kind;
  if (state_ == State::over || (outcome_ && outcome_->kind == Kind::stopped)) return;
  outcome_ = std::move(outcome);
  if (outcome_->kind == Kind::done) return finish(0);
  if (outcome_->kind == Kind::failed && own_ && !same_process(*own_, outcome_->failure))
    ended_.later.insert(ended_.later.begin(), *own_);
  if (state_ == State::running) return end_processes(SIGTERM);
  if (state_ == State::settling || state_ == State::beginning) return report_outcome();
  if_all_have_ended();
}

void Agent::all_ended(const EndedNode& all) {
  if (state_ != State::settling) return;
  timer_.cancel();
  ended_ = all;
  if (attempt_ < options_.max_restarts) return restart();
  report_failure();
}

void Agent::broken(const std::exception_ptr& error) {
  if (state_ == State::over) return;
  if (state_ == State::meeting) {
    problem_ = error;
    return finish(exit_lost);
  }
  auto why = own_failure("");
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    why.what = exception.what();
  }
  if (spec_.node_rank != 0) why.what += "; node 0, which serves it, has ended or cannot be reached";
  // If a process has failed, report that failure: it matters more than the loss of the store.
  if (outcome_ && outcome_->kind == Nodes::Outcome::Kind::failed) why = outcome_->failure;
  outcome({Nodes::Outcome::Kind::stopped, own_.value_or(why)});
}

void Agent::signalled(int number) {
  if (state_ == State::over) return;
  if (std::ranges::find(passed_on, number) != passed_on.end()) {
    if (ranks_->running() > 0) ranks_->signal(number);
    return;
  }
  const bool again = std::exchange(signal_, number) != 0;
  if (state_ == State::meeting || state_ == State::settling || state_ == State::beginning ||
      ranks_->running() == 0) {
    if (state_ != State::meeting)
      link_->stop(own_failure(fmt::format("interrupted by {}", name_of_signal(number)), number));
    return report_stop();
  }
  if (again) return kill_processes();
  if (state_ == State::ending) return ranks_->signal(number);
  link_->stop(own_failure(fmt::format("interrupted by {}", name_of_signal(number)), number));
  end_processes(number);
}

// ---- Reactions ----

Failure Agent::own_failure(std::string what, int signal) const {
  Failure failure{.time_s = seconds_since_1970(), .pid = getpid(), .what = std::move(what)};
  failure.node_rank = spec_.node_rank;
  failure.hostname = node_info_.hostname;
  ipc::set_exit(failure, signal);
  return failure;
}

void Agent::fail(Failure failure) {
  own_ = std::move(failure);
  link_->failed(*own_);
  end_processes(SIGTERM);
}

/// Sends the signal to all running processes, and kills them after terminate_timeout_s.
void Agent::end_processes(int signal) {
  state_ = State::ending;
  ranks_->take_events();
  if (state_ != State::ending) return;  // take_events() reported the last end.
  for (int rank = 0; rank < ranks_->count(); ++rank) {
    if (ranks_->has_ended(rank))
      ended_of_itself_.insert(rank);
    else
      ++ended_.ended;
  }
  asked_ = true;
  ranks_->signal(signal);
  timer_.expires_after(seconds(spec_.terminate_timeout_s));
  timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error) kill_processes();
  });
  if_all_have_ended();
}

void Agent::kill_processes() {
  if (state_ != State::ending) return;
  if (!killed_) {
    killed_ = true;
    ranks_->signal(SIGKILL);
    timer_.expires_after(seconds(timing::sits_in_kernel_s));
    timer_.async_wait([this](const boost::system::error_code& error) {
      if (!error) kill_processes();
    });
    return;
  }
  base::log().error("{} cannot be killed: blocked in the kernel", processes(ranks_->running()));
  if (own_ || outcome_) return report_failure();
  report_stop();
}

void Agent::if_all_have_ended() {
  if (state_ != State::ending || ranks_->running() > 0) return;
  const bool failed = own_ || (outcome_ && outcome_->kind == Nodes::Outcome::Kind::failed);
  if (signal_ != 0) return failed ? report_failure() : report_stop();
  if (!outcome_) return;  // Wait for the store to say which failure of all nodes was the first.
  timer_.cancel();
  if (outcome_->kind == Nodes::Outcome::Kind::stopped) return report_outcome();
  settle();
}

/// Of a launch that was stopped.
void Agent::report_outcome() {
  if (outcome_->failure.signal != 0 && outcome_->failure.rank < 0) return report_stop();
  report_failure();
}

void Agent::settle() {
  state_ = State::settling;
  link_->ended(ended_);
  timer_.expires_after(seconds(spec_.terminate_timeout_s + timing::sits_in_kernel_s + Nodes::lost_after_s));
  timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error && state_ == State::settling) report_failure();
  });
}

void Agent::restart() {
  const auto& first = outcome_->failure;
  const auto why = outcome_->kind == Nodes::Outcome::Kind::changed
                       ? first.what
                       : fmt::format("rank {} ({}) failed: {}", first.rank, first.hostname, first.exit);
  say(fmt::format("accelmgr: {}; restart {} of {}", why, attempt_ + 1, options_.max_restarts));
  state_ = State::beginning;
  link_->begin(attempt_ + 1);
  timer_.expires_after(seconds(options_.rendezvous_timeout_s + 2 * Nodes::lost_after_s));
  timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error && state_ == State::beginning) report_failure();
  });
}

void Agent::report_failure() {
  FailureSummary summary{.first = outcome_ ? outcome_->failure : *own_,
                         .later = ended_.later,
                         .ended = ended_.ended,
                         .attempt = attempt_,
                         .max_restarts = options_.max_restarts,
                         .report = {}};
  if (write_report(options_.log_directory, summary_json(summary)))
    summary.report = std::filesystem::absolute(report_of(options_.log_directory)).string();
  say(summary_text(summary));
  finish(exit_code_of(summary.first));
}

void Agent::report_stop() {
  if (signal_ != 0) {
    say(fmt::format("accelmgr: interrupted by {}; {} ended", name_of_signal(signal_),
                    processes(ended_.ended)));
    return finish(128 + signal_);
  }
  const auto& why = outcome_->failure;
  say(fmt::format("accelmgr: node {} ({}) was {}; {} ended", why.node_rank, why.hostname, why.what,
                  processes(ended_.ended)));
  finish(exit_code_of(why));
}

void Agent::say(const std::string& text) { terminal_.write(STDERR_FILENO, text + "\n"); }

void Agent::finish(int exit_code) {
  state_ = State::over;
  exit_code_ = exit_code;
  timer_.cancel();
  loop_.stop();
}

}  // namespace accelmgr::agent
