// The agent of `accelmgr spawn` on one node. It meets the agents of the other nodes, starts the processes of
// this node, and makes sure that the processes of all nodes end together.
//
// clang-format off
//   | state     | waits until                      | next                                                |
//   |-----------|----------------------------------|-----------------------------------------------------|
//   | meeting   | agents of enough nodes are here  | running                                             |
//   | running   | processes end, here or elsewhere | ending: one failed, nodes changed, or a signal came; |
//   |           |                                  | over: all done                                      |
//   | ending    | all processes here have ended    | settling; over: no restart can help                 |
//   | settling  | no process is left on any node   | beginning: a restart is left; over: none is left    |
//   | beginning | node 0 has made the next world   | running: the next attempt                           |
//   | over      |                                  |                                                     |
// clang-format on
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launcher/agent/local_ranks.hpp"
#include "launcher/agent/node_link.hpp"
#include "launcher/agent/terminal.hpp"
#include "launcher/launch/plan/launch_spec.hpp"
#include "launcher/launch/plan/node_info.hpp"
#include "launcher/launch/run/ports.hpp"

namespace accelmgr::agent {

struct AgentOptions {
  launch::Options launch = {};
  std::vector<std::string> program = {};  ///< argv, executed as it is.
  bool prefix = true;
  std::filesystem::path log_directory = {};  ///< May be empty.
  int max_restarts = 0;
  int min_nodes = 0;  ///< The world may shrink to this many nodes; 0: its size is fixed.
  double rendezvous_timeout_s = 60;
  std::string run_id = {};  ///< TORCHELASTIC_RUN_ID of the processes; empty: a unique one is made.
};

class Agent {
 public:
  /// Invalid options throw ConfigError, before any process is started or port is bound.
  Agent(AgentOptions options, launch::NodeInfo node_info);

  struct Result {
    int exit_code = 0;
    /// False: a thread hangs in a call to the store. The program must end without destructors.
    bool clean = true;
  };
  /// Blocks until the launch is over. May be called once. Throws ConfigError and SessionError if the nodes do
  /// not meet.
  Result run();

 private:
  enum class State { meeting, running, ending, settling, beginning, over };

  void open_store();
  void watch_signals();
  std::map<std::string, std::string> environment() const;
  void start_attempt();

  // Events.
  void met(World world);
  void rank_ended(int local_rank);
  void fork_server_ended(const std::string& how);
  void outcome(Nodes::Outcome outcome);
  void all_ended(const EndedNode& all);
  void broken(const std::exception_ptr& error);
  void signalled(int number);

  // Reactions.
  void fail(Failure failure);
  void end_processes(int signal);
  void kill_processes();
  void if_all_have_ended();
  void report_outcome();
  void settle();
  void restart();
  void report_failure();
  void report_stop();
  void finish(int exit_code);
  void say(const std::string& text);
  Failure own_failure(std::string what, int signal = 0) const;

  AgentOptions options_;
  launch::NodeInfo node_info_;
  launch::LaunchSpec spec_;
  launch::WorkerPorts ports_;
  Terminal terminal_;
  boost::asio::io_context loop_;
  boost::asio::signal_set signals_;
  boost::asio::steady_timer timer_;
  std::unique_ptr<LocalRanks> ranks_;
  base::UniqueFd world_memory_;  ///< For collectives of the ranks on one node; new for each attempt.
  std::unique_ptr<NodeLink> link_;

  State state_ = State::meeting;
  std::optional<World> world_;
  int attempt_ = 0;
  int signal_ = 0;              ///< The last signal that asked the program to end; 0: none.
  std::optional<Failure> own_;  ///< The first failure on this node, in this attempt.
  std::optional<Nodes::Outcome> outcome_;
  EndedNode ended_;
  bool asked_ = false;             ///< The processes were asked to end.
  std::set<int> ended_of_itself_;  ///< Local ranks that had ended before that; their events come later.
  bool killed_ = false;
  int exit_code_ = 0;
  std::exception_ptr problem_;  ///< The error that run() throws.
};

}  // namespace accelmgr::agent
