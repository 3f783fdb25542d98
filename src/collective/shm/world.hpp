// One rank's membership in a world: its registration, and the table of groups.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.hpp"
#include "collective/fork_mark.hpp"
#include "collective/shm/liveness.hpp"
#include "collective/shm/memory.hpp"

namespace accelmgr::collective::shm {

/// What all members of a group know of it before they have a slot.
struct GroupKey {
  std::uint64_t parent = 0;  ///< Id of the group it is made from; 0: it is the world.
  std::uint64_t ordinal =
      0;                     ///< Which group of these members from this parent; of the world: how many joins.
  std::vector<int> members;  ///< Ranks of this host's world, ascending.
};

struct Claim {
  std::size_t slot;
  std::uint64_t id;
};

/// Thread-safe.
class World {
 public:
  /// `world_ranks` as in JoinOptions. Throws UsageError, SessionError.
  World(int fd, int rank, double timeout_s, std::vector<int> world_ranks);

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(memory_.header().ranks); }
  double timeout_s() const noexcept { return timeout_s_; }
  /// In the world of all hosts.
  int world_rank(int rank) const noexcept { return world_ranks_[static_cast<std::size_t>(rank)]; }
  Memory& memory() noexcept { return memory_; }
  Liveness& liveness() noexcept { return liveness_; }
  /// How long a wait may spin: not at all before all ranks have come, nor when they outnumber the cores that
  /// they may use together.
  int spin_us() noexcept;
  /// True in a forked child of the process that joined.
  bool inherited() const noexcept { return fork_mark_.inherited(); }

  /// Registers this process, and makes it a member of the group of all ranks. Throws SessionError when the
  /// rank is taken.
  Claim join();
  /// Finds the slot of a group, or takes a free one, and makes this rank a member. Throws SessionError when
  /// all slots are in use or there is no memory, CollectiveError{timeout}.
  Claim claim(const GroupKey& key, base::Deadline deadline);
  /// This rank has no more to do with the slot; `as_world`: nor with this world, as far as that is joined.
  /// Gives up after a second.
  void leave(std::size_t slot, int member, bool as_world) noexcept;

  /// The process of a rank; 0 when it never joined.
  Identity identity_of_rank(int rank) const noexcept {
    return memory_.rank(rank).identity.load(std::memory_order_acquire);
  }

 private:
  class Lock;

  Claim claim_locked(const GroupKey& key);
  std::size_t free_slot();
  bool serves(const Slot& slot, const GroupKey& key) const noexcept;
  /// Whether all members have left, or, looking closer, never will come any more.
  bool is_over(std::size_t slot, bool look_closer);
  void release(std::size_t slot) noexcept;
  std::vector<int> members_of(const Slot& slot) const;

  Memory memory_;
  Liveness liveness_;
  ForkMark fork_mark_;
  std::mutex mutex_;  ///< Between the threads of this rank.
  Identity self_;
  int rank_;
  std::atomic<int> spin_us_ = -1;  ///< Below 0: not yet known.
  double timeout_s_;
  std::vector<int> world_ranks_;
};

}  // namespace accelmgr::collective::shm
