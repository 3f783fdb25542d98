// Runs the ranks of a test on two nodes (tests/launcher/contract/two_nodes). The test program executes itself
// on each node, for this test alone, and forks the ranks there.
#pragma once

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

struct Nodes {
  std::vector<int> a = {0, 1}, b = {2, 3};  ///< The ranks of each node.
  std::vector<int> deaths = {};             ///< The ranks that must end by die().
  int cable_mbit = 0;                       ///< The megabits that the cable carries in a second; 0: no limit.
};

/// Runs `scenario`, which may use GoogleTest's assertions, on all ranks. Skips the test if there cannot be
/// two nodes here. A failure of a rank fails the test with all output.
void run_on_two_nodes(const Nodes& nodes, void (*scenario)(RankOnNode&));

/// Takes down the cable between the nodes.
void take_link_down();

}  // namespace accelmgr::collective::two_nodes_test
