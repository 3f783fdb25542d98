// How the agents of several hosts agree, through a store. One host is the same with nobody else in it.
//
//   meet()          every agent says who it is; that of node 0 compares, and tells everyone what the world is
//   attempt a       report_failed(): the first of all counts;  report_done(): all local processes have ended
//   well
//                   look() says what has come of it: running, failed, done, or stopped
//   report_ended()  after a failure, when no local process is left; then all_ended(): those of all hosts
//   begin()         the next attempt; that of node 0 has emptied the store of what the programs put there
//   leave()         the agent of node 0, which serves the store, goes last
//
// Nothing here waits, but leave(): its user calls again. All calls throw SessionError when the store cannot
// be reached. One thread at a time.
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

/// What each agent says of itself.
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
  std::string run_id;       ///< The same on all hosts; of no two runs.

  int size() const;
  int rank_offset(int node_rank) const;
};

/// What an agent ended after a failure.
struct EndedNode {
  std::vector<RankFailure> later = {};  ///< Processes that failed of themselves, after the first.
  int ended = 0;                        ///< Processes that were ended.
};

class Nodes {
 public:
  /// An agent that gives no sign of life for so long is lost.
  static constexpr double lost_after_s = 10;

  /// `now_ns`: of a clock that tests can set.
  Nodes(collective::Store& store, int node_rank, Node self, std::int64_t (*now_ns)() = &base::now_ns);

  /// The world, once all are there. Throws ConfigError, on all hosts, when two agents contradict each other;
  /// it says who; SessionError when node 0 has given up waiting. One that takes the place of another is alone
  /// with its error.
  std::optional<World> meet();
  /// Who is there, and who is not, after meet() has waited too long. Tells the others.
  SessionError missing(const std::string& address, double waited_s);

  struct Outcome {
    enum class Kind { running, failed, done, stopped } kind = Kind::running;
    RankFailure failure = {};  ///< failed, stopped: the first one.
  };
  Outcome look();
  /// Why all hosts are to stop for good; nullopt: they are not.
  std::optional<RankFailure> stopped();

  void report_failed(const RankFailure& failure);
  void report_done();
  /// For good, on all hosts: a signal, or something that a new attempt cannot mend.
  void stop(const RankFailure& why);
  void report_ended(const EndedNode& ended);
  /// Of all hosts but those that are lost; nullopt while some are missing.
  std::optional<EndedNode> all_ended();

  /// False: the agent of node 0 has not begun it yet. `empty_store` is called on node 0, when all have ended.
  template <class EmptyStore>
  bool begin(int attempt, EmptyStore&& empty_store) {
    if (attempt == attempt_) return true;
    if (node_rank_ == 0) {
      empty_store();
      announce(attempt);
    }
    return follow(attempt);
  }

  /// Blocks on node 0 until all others have left, or the deadline.
  void leave(base::Deadline deadline) noexcept;

  /// All keys of the agents begin so.
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
  std::map<int, Node> known_;  ///< Those that have come, by node rank.
  std::map<int, Beat> beats_;
  std::int64_t looked_ns_ = 0;
};

}  // namespace accelmgr::program
