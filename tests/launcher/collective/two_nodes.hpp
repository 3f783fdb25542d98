// Runs scenarios on ranks on two nodes (tests/launcher/contract/two_nodes). The test program executes itself
// on each node and forks the ranks there; each rank runs the scenario of a given name. A scenario may use
// GoogleTest's assertions.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "launcher/collective/nodes/nodes.hpp"
#include "launcher/collective/rendezvous/store.hpp"

namespace accelmgr::collective::two_nodes_test {

class RankOnNode {
 public:
  RankOnNode(Store& store, int rank, int size) : store_(store), rank_(rank), size_(size) {}

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  Store& store() noexcept { return store_; }
  /// Meets all ranks by rendezvous(), and returns their world.
  std::shared_ptr<Communicator> meet(double timeout_s, const std::string& backend = "auto");
  /// Notes the time in the store and kills this process with SIGKILL.
  [[noreturn]] void die();
  /// The seconds since `rank` called die().
  double seconds_since_death_of(int rank);

 private:
  Store& store_;
  int rank_;
  int size_;
};

using Scenario = void (*)(RankOnNode&);

/// A scenario, and the ranks that must end by die().
struct Entry {
  Scenario scenario;
  std::vector<int> deaths;
};
std::map<std::string, Entry>& scenarios();

struct Registered {
  Registered(const std::string& name, Entry entry) { scenarios()[name] = std::move(entry); }
};

/// Runs the scenario with the ranks `a` on node A and the ranks `b` on node B. Skips the test if there cannot
/// be two nodes here. A failure of a rank fails the test with all output. `cable_mbit` limits the megabits
/// that the cable carries in a second; 0: no limit.
void run_on_two_nodes(const std::string& scenario, const std::vector<int>& a, const std::vector<int>& b,
                      int cable_mbit = 0);

/// Takes down the cable between the nodes.
void take_link_down();

}  // namespace accelmgr::collective::two_nodes_test
