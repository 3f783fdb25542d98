// The agent of `accelmgr spawn` on one host: meets those of the other hosts, starts the processes of this
// one, and sees to it that all of them end together.
//
// clang-format off
//   | state     | what is awaited                       | next                                                                       |
//   |-----------|---------------------------------------|----------------------------------------------------------------------------|
//   | meeting   | the agents of all hosts               | running                                                                    |
//   | running   | an end, here or elsewhere             | ending: a process failed, or a signal came;  over: all have ended well       |
//   | ending    | the ends of all processes here        | settling: one failed;  over: a signal, or what a new attempt cannot mend     |
//   | settling  | that no process is left on any host   | beginning: a restart is left;  over                                         |
//   | beginning | node 0 has emptied the store          | running: the next attempt                                                   |
//   | over      |                                       |                                                                             |
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

#include "launch/machine.hpp"
#include "launch/plan.hpp"
#include "launch/ports.hpp"
#include "local_ranks.hpp"
#include "node_link.hpp"
#include "terminal.hpp"

namespace accelmgr::program {

struct AgentOptions {
  launch::Options launch = {};
  std::vector<std::string> program = {};  ///< To be executed as it is.
  bool prefix = true;
  std::filesystem::path log_directory = {};  ///< May be empty.
  int max_restarts = 0;
  double rendezvous_timeout_s = 60;
  std::string run_id = {};  ///< TORCHELASTIC_RUN_ID of the processes; empty: one that no other run has.
};

class Agent {
 public:
  /// Throws ConfigError for what cannot be, before anything is started or bound.
  Agent(AgentOptions options, launch::Machine machine);

  struct Result {
    int exit_code = 0;
    /// False: a thread hangs in a call that nobody answers. The program must end without destructors.
    bool clean = true;
  };
  /// Blocks until it is over. Throws ConfigError and SessionError when the hosts do not come together. Once.
  Result run();

 private:
  enum class State { meeting, running, ending, settling, beginning, over };

  void open_store();
  void watch_signals();
  std::map<std::string, std::string> environment() const;
  void start_attempt();

  // What happens.
  void met(World world);
  void rank_ended(int local_rank);
  void launcher_ended(const std::string& how);
  void outcome(Nodes::Outcome outcome);
  void all_ended(const EndedNode& all);
  void begun();
  void broken(const std::exception_ptr& error);
  void signalled(int number);

  // What follows.
  void fail(RankFailure failure);
  void end_processes(int signal);
  void kill_processes();
  void if_all_have_ended();
  void settle();
  void restart();
  void report_failure();
  void report_stop();
  void finish(int exit_code);
  void say(const std::string& text);
  RankFailure own_failure(std::string what, int signal = 0) const;

  AgentOptions options_;
  launch::Machine machine_;
  launch::Plan plan_;
  launch::WorkerPorts ports_;
  Terminal terminal_;
  boost::asio::io_context loop_;
  boost::asio::signal_set signals_;
  boost::asio::steady_timer timer_;
  std::unique_ptr<LocalRanks> ranks_;
  base::UniqueFd store_socket_;
  base::UniqueFd world_memory_;  ///< Through which the ranks of one host collect; anew for each attempt.
  std::unique_ptr<NodeLink> link_;

  State state_ = State::meeting;
  std::optional<World> world_;
  int attempt_ = 0;
  int signal_ = 0;                  ///< That asked to end; 0: none.
  std::optional<RankFailure> own_;  ///< The first one here.
  std::optional<Nodes::Outcome> outcome_;
  EndedNode ended_;
  bool asked_ = false;             ///< The processes were asked to end.
  std::set<int> ended_of_itself_;  ///< Local ranks whose end, told later, was before that.
  bool killed_ = false;
  int exit_code_ = 0;
  std::exception_ptr problem_;  ///< Thrown by run().
};

}  // namespace accelmgr::program
