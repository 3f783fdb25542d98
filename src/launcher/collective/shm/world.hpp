// One rank's membership in a world: its registration, and the table of groups.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.hpp"
#include "launcher/collective/fork_mark.hpp"
#include "launcher/collective/shm/liveness.hpp"
#include "launcher/collective/shm/memory.hpp"

namespace accelmgr::collective::shm {

/// What identifies a group before it has a slot. All members know it.
struct GroupKey {
  std::uint64_t parent = 0;  ///< Id of the group it is made from; 0: this is the world.
  std::uint64_t ordinal =
      0;  ///< Counts groups with these members and this parent; for the world: counts joins.
  std::vector<int> members;  ///< Ranks in this node's world, ascending.
};

struct Claim {
  std::size_t slot;
  std::uint64_t id;
};

/// Thread-safe.
class World {
 public:
  /// `world_ranks`: see JoinOptions. Throws UsageError when `rank` is out of range, SessionError when `fd` is
  /// no world of this build.
  World(int fd, int rank, double timeout_s, std::vector<int> world_ranks);

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(memory_.header().ranks); }
  double timeout_s() const noexcept { return timeout_s_; }
  /// Returns the rank in the world of all nodes.
  int world_rank(int rank) const noexcept { return world_ranks_[static_cast<std::size_t>(rank)]; }
  Memory& memory() noexcept { return memory_; }
  Liveness& liveness() noexcept { return liveness_; }
  /// How long a wait may spin, in microseconds. 0 in a world that parks, until all ranks have joined, and
  /// when there are more ranks than cores on which they may run together.
  int spin_us() noexcept;
  /// True in a forked child of the process that joined.
  bool inherited() const noexcept { return fork_mark_.inherited(); }

  /// Registers this process as its rank and makes it a member of the group of all ranks. Throws SessionError
  /// when the rank is taken.
  Claim join();
  /// Finds the slot of a group, or takes a free one, and makes this rank a member. Throws SessionError when
  /// all slots are in use, or there is too little memory; CollectiveError{timeout} when the lock is not free
  /// by the deadline.
  Claim claim(const GroupKey& key, base::Deadline deadline);
  /// Takes this rank out of the slot's group; if `as_world`, out of the world too. Blocks for at most a
  /// second.
  void leave(std::size_t slot, int member, bool as_world) noexcept;

  /// Identity of the process that joined last as `rank`; 0: none yet.
  Identity identity_of_rank(int rank) const noexcept {
    return memory_.rank(rank).identity.load(std::memory_order_acquire);
  }

 private:
  class Lock;

  Claim claim_locked(const GroupKey& key);
  std::size_t free_slot();
  /// Returns whether all members have left. If `look_closer`, members that can never come or have ended count
  /// as gone.
  bool is_over(std::size_t slot, bool look_closer);
  void release(std::size_t slot) noexcept;

  Memory memory_;
  Liveness liveness_;
  ForkMark fork_mark_;
  std::mutex mutex_;  ///< Serializes the threads of this rank.
  Identity self_;
  int rank_;
  std::atomic<int> spin_us_ = -1;  ///< Below 0: unknown yet.
  double timeout_s_;
  std::vector<int> world_ranks_;
};

}  // namespace accelmgr::collective::shm
