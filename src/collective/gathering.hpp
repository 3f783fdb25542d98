// Where ranks that are to become the members of something new wait for each other: in the store, under a
// name. Who gives up says so there, to those who wait and to those who come too late.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/clock.hpp"
#include "collective/shared_store.hpp"

namespace accelmgr::collective {

class Gathering {
 public:
  /// `name`: in the store; never used before. `dead`: asked while this waits for members; their ranks in the
  /// world.
  Gathering(SharedStore& store, std::string name, double timeout_s, base::Deadline deadline,
            std::function<std::vector<int>()> dead = {});

  void set(const std::string& key, const std::string& value) { store_.set(name_ + '/' + key, value); }
  /// Waits until somebody has set it. Throws CollectiveError: timeout; what another member gave up for; lost.
  std::string get(const std::string& key);
  /// What all members, of `ranks` in the world, pass here. Throws as get(), and names those who did not come.
  std::vector<std::string> exchange(int rank, const std::vector<int>& ranks, const std::string& value);

  /// Returns body(); when that throws CollectiveError, this member has given up.
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

 private:
  /// Nothing at the deadline, or when it is interrupted.
  std::optional<std::string> wait_for(const std::string& key, std::string& why_not);
  void look();

  SharedStore& store_;
  std::string name_;
  double timeout_s_;
  base::Deadline deadline_;
  std::function<std::vector<int>()> dead_;
};

}  // namespace accelmgr::collective
