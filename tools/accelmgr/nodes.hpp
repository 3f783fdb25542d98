// The protocol by which the agents of several hosts agree through a store. A single host uses it too.
//
//   meet()          each agent describes itself; node 0 compares the agents and publishes the world
//   an attempt      report_failed(): the first failure of all hosts is the one that is reported
//                   report_done(): all processes of this host have succeeded
//                   look() returns the outcome: running, failed, done or stopped
//   report_ended()  after a failure, when no process of this host is left; all_ended() collects all hosts
//   begin()         begins the next attempt; node 0 first erases the keys of the programs
//   leave()         node 0, which serves the store, leaves last
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
#include "collective/store.hpp"
#include "failure_summary.hpp"

namespace accelmgr::program {

/// How an agent describes itself.
struct Node {
  int nnodes = 1;
  int nprocs = 1;
  int max_restarts = 0;
  std::string backend = {};
  std::string host = {};
  pid_t pid = 0;

  bool operator==(const Node&) const = default;
};

struct World {
  std::vector<Node> nodes;  ///< By node rank.
  std::string run_id;       ///< The same on all hosts; unique to this run.

  int size() const;
  int rank_offset(int node_rank) const;
};

/// The processes of a host that ended after the first failure.
struct EndedNode {
  std::vector<RankFailure> later = {};  ///< Processes that failed by themselves.
  int ended = 0;                        ///< The number of processes that the agent ended.
};

class Nodes {
 public:
  /// An agent without a heartbeat for this long counts as lost.
  static constexpr double lost_after_s = 10;

  /// `now_ns` is the clock; tests pass their own.
  Nodes(collective::Store& store, int node_rank, Node self, std::int64_t (*now_ns)() = &base::now_ns);

  /// The world; nullopt while agents are missing. Throws ConfigError on all hosts if two agents contradict
  /// each other, and names them; SessionError if node 0 has given up waiting. An agent whose node rank is
  /// taken also gets a ConfigError; the others do not.
  std::optional<World> meet();
  /// Called after meet() has waited too long: the error that lists present and missing agents. On node 0 it
  /// also tells the other agents.
  SessionError missing(const std::string& address, double waited_s);

  struct Outcome {
    enum class Kind { running, failed, done, stopped } kind = Kind::running;
    RankFailure failure = {};  ///< If failed or stopped: the first one of all hosts.
  };
  /// The outcome of this attempt so far. Also sends a heartbeat; on node 0 it watches the other heartbeats.
  Outcome look();
  /// The reason why all hosts must stop for good; nullopt if they need not.
  std::optional<RankFailure> stopped();

  void report_failed(const RankFailure& failure);
  void report_done();
  /// Stops all hosts for good: after a signal, or an error that a new attempt cannot mend.
  void stop(const RankFailure& why);
  void report_ended(const EndedNode& ended);
  /// The sum of all hosts' reports, failures in the order of time; nullopt while a report is missing.
  std::optional<EndedNode> all_ended();

  /// False if node 0 has not begun the attempt yet. On node 0 it first calls `empty_store`; all processes
  /// must have ended by then.
  template <class EmptyStore>
  bool begin(int attempt, EmptyStore&& empty_store) {
    if (attempt == attempt_) return true;
    if (node_rank_ == 0) {
      empty_store();
      announce(attempt);
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
  void claim_place();
  void check_contradictions();
  void contradict(const std::string& what);
  std::optional<World> collect();
  void watch_the_others();
  bool all_have(const std::string& name);
  void announce(int attempt);
  bool follow(int attempt);

  collective::Store& store_;
  int node_rank_;
  Node self_;
  std::int64_t (*now_ns_)();
  bool claimed_ = false;
  int attempt_ = 0;
  int node_count_ = 1;
  std::map<int, Node> known_;  ///< The agents that this one has read, by node rank.
  std::map<int, Beat> beats_;
  std::int64_t looked_ns_ = 0;
};

}  // namespace accelmgr::program
