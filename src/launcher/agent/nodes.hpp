// The protocol by which the agents of several nodes agree through a store. A single node uses it too.
//
// clang-format off
//   meet()          each agent describes itself; node 0 compares the agents and publishes the world
//   an attempt      report_failed(): the first failure of all nodes is the one that is reported
//                   report_done(): all processes of this node have succeeded
//                   look() returns the outcome: running, failed, changed, done or stopped
//   report_ended()  after a failure or a change, when no process of this node is left; all_ended() collects all
//                   nodes
//   begin()         begins the next attempt; node 0 first erases the keys of the programs
//   leave()         node 0, which serves the store, leaves last
// clang-format on
//
// A world is elastic if min_nodes < nnodes. Then node 0 publishes a new world for each attempt: without
// agents that were lost, and with those that came meanwhile. Every agent has a number that no other one ever
// gets; node ranks follow --node-rank. In a world of fixed size the number is the node rank, and a lost agent
// stops the launch.
//
// Only leave() waits; the caller repeats the other calls. All calls throw SessionError if the store cannot be
// reached. One thread at a time.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "launcher/agent/failure_summary.hpp"
#include "launcher/collective/rendezvous/store.hpp"

namespace accelmgr::agent {

/// How an agent describes itself.
struct Node {
  int nnodes = 1;
  int min_nodes = 1;  ///< nnodes: the size of the world is fixed.
  int node_rank = 0;  ///< As configured.
  int nprocs = 1;
  int max_restarts = 0;
  std::string backend = {};
  std::string hostname = {};
  pid_t pid = 0;

  bool is_elastic() const noexcept { return min_nodes < nnodes; }
  bool operator==(const Node&) const = default;
};

/// The agents of one attempt.
struct World {
  std::vector<Node> nodes = {};  ///< By node rank.
  std::vector<int> agents = {};  ///< Their numbers.
  int attempt = 0;
  int node_rank = 0;        ///< Of this agent.
  std::string run_id = {};  ///< The same on all nodes; unique to this run.

  int size() const;
  int rank_offset(int node_rank) const;
};

/// The processes of a node that ended after the first failure.
struct EndedNode {
  std::vector<Failure> later = {};  ///< Processes that failed by themselves.
  int ended = 0;                    ///< The number of processes that the agent ended.
};

class Nodes {
 public:
  /// An agent without a heartbeat for this long counts as lost.
  static constexpr double lost_after_s = 10;

  /// `now_ns` is the clock; tests pass their own.
  Nodes(collective::Store& store, Node self, std::int64_t (*now_ns)() = &base::now_ns);

  /// The world; nullopt while agents are missing. An elastic world needs all nnodes agents, or min_nodes if
  /// the caller does not want to wait any `longer`. Throws ConfigError on all nodes if two agents contradict
  /// each other, and names them; SessionError if node 0 has given up waiting. An agent whose node rank is
  /// taken also gets a ConfigError, and so does one that contradicts an elastic world; the others do not.
  std::optional<World> meet(bool longer = true);
  /// Called when meet() or begin() has waited too long: the error that lists present and missing agents. On
  /// node 0 it also tells the other agents.
  SessionError missing(const std::string& address, double waited_s);

  /// After begin() has waited too long: node 0 stops all nodes, another agent throws `why`.
  void give_up(const SessionError& why);

  struct Outcome {
    /// changed: a node of an elastic world was lost, or another one came.
    enum class Kind { running, failed, changed, done, stopped } kind = Kind::running;
    Failure failure = {};  ///< If failed or stopped: the first one of all nodes; if changed: what has.
  };
  /// The outcome of this attempt so far. Also sends a heartbeat; on node 0 it watches the other heartbeats.
  Outcome look();
  /// Sends a heartbeat, where no other call does.
  void beat();
  /// The reason why all nodes, or this one, must stop for good; nullopt if they need not.
  std::optional<Failure> stopped();

  void report_failed(const Failure& failure);
  void report_done();
  /// Stops all nodes for good: after a signal, or an error that a new attempt cannot mend.
  void stop(const Failure& why);
  void report_ended(const EndedNode& ended);
  /// The sum of all nodes' reports, failures in the order of time; nullopt while a report is missing.
  std::optional<EndedNode> all_ended();

  /// The world of the attempt; nullopt if node 0 has not begun it, for which an elastic world needs min_nodes
  /// agents. On node 0 it first calls `empty_store`; all processes must have ended by then.
  template <class EmptyStore>
  std::optional<World> begin(int attempt, EmptyStore&& empty_store) {
    beat();
    if (agent_ == 0)
      if (const auto world = collect(attempt, false)) {
        empty_store();
        announce(*world);
      }
    return follow(attempt);
  }

  /// On node 0: blocks until all other agents have left, or the deadline passes.
  void leave(base::Deadline deadline) noexcept;

  /// All keys of the agents begin with this.
  static constexpr const char* prefix = "accelmgr/spawn/";

 private:
  struct Beat {
    std::int64_t count = -1;
    std::int64_t changed_ns = 0;
  };
  std::string key(const std::string& name) const { return prefix + name; }
  std::string key(const std::string& name, int number) const;
  std::string of_attempt(const std::string& name) const;
  std::string read(const std::string& name);
  std::string place_of(int agent) const;
  void claim_place();
  void check_contradictions();
  void contradict(const std::string& what);
  /// An agent that may be in the next world: it has come and not left, and its heart beats.
  bool is_candidate(int agent);
  std::optional<World> collect(int attempt, bool longer);
  std::optional<World> follow(int attempt);
  void announce(const World& world);
  bool has_heartbeat(int agent);
  void watch_the_others(const std::string& except_who_has);
  void admit_newcomers();
  void change(const Failure& why);
  bool is_lost(int agent);
  bool all_have(const std::string& name);

  collective::Store& store_;
  Node self_;
  std::int64_t (*now_ns_)();
  int agent_ = 0;  ///< The number of this agent.
  bool claimed_ = false;
  World world_;                ///< Of this attempt.
  std::map<int, Node> known_;  ///< The agents that this one has read, by number.
  std::map<int, Beat> beats_;
  std::int64_t beat_ns_ = 0;
};

}  // namespace accelmgr::agent
