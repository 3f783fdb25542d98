// A rendezvous in the store: the future members of a mesh or communicator wait for each other under a name. A
// member that gives up writes the reason there. Members that wait, or come later, throw the same error.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/clock.hpp"
#include "launcher/collective/rendezvous/shared_store.hpp"

namespace accelmgr::collective {

class Rendezvous {
 public:
  /// `name` is the prefix of the keys in the store; it must never have been used before. `dead` is called
  /// while this member waits; it returns the ranks in the world of members that have died.
  Rendezvous(SharedStore& store, std::string name, double timeout_s, base::Deadline deadline,
             std::function<std::vector<int>()> dead = {});

  /// Publishes `value` and blocks until all members have published theirs; returns all values in the order of
  /// members. `rank` is this process's index among the members, `ranks` are the members' ranks in the world.
  /// Throws CollectiveError: timeout, which names the missing ranks, lost, or the error with which another
  /// member gave up.
  std::vector<std::string> exchange(int rank, const std::vector<int>& ranks, const std::string& value);

  /// Returns body(). If body() throws CollectiveError, calls give_up() and rethrows.
  template <class Body>
  auto attempt(Body&& body) {
    try {
      return body();
    } catch (const CollectiveError& error) {
      give_up(error);
      throw;
    }
  }
  void give_up(const CollectiveError& why) noexcept;
  /// Throws the error with which another member gave up, or that a member has died. Does not wait.
  void look();

 private:
  /// Returns nullopt at the deadline or when interrupted; `why_not` is the store's error then.
  std::optional<std::string> wait_for(const std::string& key, std::string& why_not);

  SharedStore& store_;
  std::string name_;
  double timeout_s_;
  base::Deadline deadline_;
  std::function<std::vector<int>()> dead_;
};

}  // namespace accelmgr::collective
