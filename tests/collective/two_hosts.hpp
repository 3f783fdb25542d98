// Ranks on two hosts (tests/contract/two_hosts): this program runs itself on each, forks the ranks there, and
// in each runs one of the scenarios by its name. A scenario checks with GoogleTest's assertions.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "collective/hosts.hpp"
#include "collective/store.hpp"

namespace accelmgr::collective::hosts_test {

class RankOnHost {
 public:
  RankOnHost(Store& store, int rank, int size) : store_(store), rank_(rank), size_(size) {}

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  Store& store() noexcept { return store_; }
  /// All ranks.
  std::shared_ptr<Communicator> meet(double timeout_s, const std::string& backend = "auto");
  /// Dies, as by kill -9.
  [[noreturn]] void die();
  /// Between the death of that rank and now.
  double seconds_since_death_of(int rank);

 private:
  Store& store_;
  int rank_;
  int size_;
};

using Scenario = void (*)(RankOnHost&);

/// Declares a scenario. Deaths: the ranks that must end by die().
struct Entry {
  Scenario scenario;
  std::vector<int> deaths;
};
std::map<std::string, Entry>& scenarios();

struct Registered {
  Registered(const std::string& name, Entry entry) { scenarios()[name] = std::move(entry); }
};

/// Ranks of host A and of host B. Skips the test where there are no two hosts; fails it with all that was
/// said. `cable_mbit`: how much the cable carries in a second; 0: as much as comes.
void run_on_two_hosts(const std::string& scenario, const std::vector<int>& a, const std::vector<int>& b,
                      int cable_mbit = 0);

/// Takes the cable out.
void take_link_down();

}  // namespace accelmgr::collective::hosts_test
