#include "launcher/collective/shm/world.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <span>

#include "accelmgr/communicator.hpp"
#include "base/timing.hpp"
#include "base/unmovable.hpp"

namespace accelmgr::collective::shm {
namespace {

std::vector<int> ranks_of_world(std::vector<int> given, int size) {
  if (given.empty()) {
    given.resize(static_cast<std::size_t>(size));
    std::iota(given.begin(), given.end(), 0);
  }
  if (static_cast<int>(given.size()) != size)
    throw UsageError(
        fmt::format("world_ranks has {} entries, but the memory is that of {} ranks", given.size(), size));
  return given;
}

/// Stores the cores on which the calling thread may run, one bit each; all zeros when there are more than a
/// cpu_set_t can name.
void note_own_cores(std::span<std::atomic<std::uint64_t>> cores) noexcept {
  cpu_set_t own;
  CPU_ZERO(&own);
  if (sched_getaffinity(0, sizeof own, &own) != 0) CPU_ZERO(&own);
  for (std::size_t word = 0; word < cores.size(); ++word) {
    std::uint64_t bits = 0;
    for (std::size_t bit = 0; bit < 64; ++bit)
      if (CPU_ISSET(word * 64 + bit, &own)) bits |= std::uint64_t{1} << bit;
    cores[word].store(bits, std::memory_order_relaxed);
  }
}

std::bitset<most_ranks> set_of(const std::vector<int>& members) noexcept {
  std::bitset<most_ranks> set;
  for (const int member : members) set[static_cast<std::size_t>(member)] = true;
  return set;
}

bool serves(const Slot& slot, const GroupKey& key) noexcept {
  return slot.used != 0 && slot.parent == key.parent && slot.ordinal == key.ordinal &&
         slot.members == set_of(key.members);
}

}  // namespace

/// A lock of the whole world, held for a few microseconds, under which the table of groups changes. It is
/// taken from a holder that has died. The holder's unfinished change does not count then: its last write is
/// the one that makes a change valid.
class World::Lock : base::Unmovable {
 public:
  Lock(World& world, base::Deadline deadline)
      : in_process_(world.mutex_), word_(world.memory_.header().lock), self_(world.self_) {
    constexpr int tries_per_look = 100;
    for (int tries = 1;; ++tries) {
      std::uint64_t holder = 0;
      if (word_.compare_exchange_strong(holder, self_, std::memory_order_acquire)) return;
      if (tries % tries_per_look != 0) {
        sched_yield();
        continue;
      }
      if (world.liveness_.has_ended(holder) &&
          word_.compare_exchange_strong(holder, self_, std::memory_order_acquire))
        return;
      if (deadline.passed()) throw held_by(world, holder);
      const timespec pause{.tv_sec = 0, .tv_nsec = 50'000};
      nanosleep(&pause, nullptr);
    }
  }
  ~Lock() { word_.store(0, std::memory_order_release); }

 private:
  static CollectiveError held_by(World& world, Identity holder) {
    std::vector<int> ranks;
    for (int rank = 0; rank < world.size(); ++rank)
      if (world.identity_of_rank(rank) == holder) ranks.push_back(world.world_rank(rank));
    return {
        fmt::format("process {} holds the lock of the table of groups and makes no progress", pid_of(holder)),
        CollectiveError::Cause::timeout, std::move(ranks)};
  }

  std::scoped_lock<std::mutex> in_process_;
  std::atomic<std::uint64_t>& word_;
  Identity self_;
};

World::World(int fd, int rank, double timeout_s, std::vector<int> world_ranks)
    : memory_(fd), self_(identity_of(getpid())), rank_(rank), timeout_s_(timeout_s) {
  if (rank < 0 || rank >= size())
    throw UsageError(fmt::format("rank {} is not within 0 to {}, the ranks of this world", rank, size() - 1));
  if (self_ == 0) throw SessionError("/proc/self/stat cannot be read; is /proc mounted?");
  world_ranks_ = ranks_of_world(std::move(world_ranks), size());
}

Claim World::join() {
  const Lock lock(*this, base::Deadline::in_seconds(timeout_s_));
  auto& line = memory_.rank(rank_);
  const auto before = line.identity.load(std::memory_order_relaxed);
  if (line.joined != 0 && !liveness_.has_ended(before))
    throw SessionError(
        fmt::format("rank {} of this world is already taken by process {}", rank_, pid_of(before)));
  GroupKey key{.parent = 0, .ordinal = line.joins + 1, .members = std::vector<int>(std::size_t(size()))};
  std::iota(key.members.begin(), key.members.end(), 0);
  const auto claim = claim_locked(key);
  line.joins = key.ordinal;
  line.joined = 1;
  note_own_cores(line.cores);
  line.identity.store(self_, std::memory_order_release);
  return claim;
}

int World::spin_us() noexcept {
  if (spin_us_ < 0) {
    if (memory_.header().parks != 0) return spin_us_ = 0;
    std::array<std::uint64_t, std::extent_v<decltype(Rank::cores)>> cores{};
    for (int rank = 0; rank < size(); ++rank) {
      if (identity_of_rank(rank) == 0) return 0;  // Some rank's cores are unknown yet.
      for (std::size_t i = 0; i < cores.size(); ++i)
        cores[i] |= memory_.rank(rank).cores[i].load(std::memory_order_relaxed);
    }
    int count = 0;
    for (const auto word : cores) count += std::popcount(word);
    spin_us_ = count >= size() || count == 0 ? timing::spin_when_alone_us : 0;
  }
  return spin_us_;
}

Claim World::claim(const GroupKey& key, base::Deadline deadline) {
  const Lock lock(*this, deadline);
  return claim_locked(key);
}

Claim World::claim_locked(const GroupKey& key) {
  std::size_t index = 0;
  while (index < slots && !serves(memory_.slot(index), key)) ++index;
  if (index == slots) {
    index = free_slot();
    auto& slot = memory_.slot(index);
    auto& header = memory_.header();
    if (slot.dirty != 0) release(index);  // Its last release was cut short by a kill.
    allocate_range(memory_.fd(), memory_.control_offset(index), header.control_bytes);
    slot.dirty = 1;
    slot.id = ++header.groups;
    slot.parent = key.parent;
    slot.ordinal = key.ordinal;
    slot.members = set_of(key.members);
    std::atomic_ref(slot.used).store(1, std::memory_order_release);
  }
  const auto position = std::lower_bound(key.members.begin(), key.members.end(), rank_) - key.members.begin();
  auto& member = memory_.members(index)[position];
  member.identity = self_;
  member.presence.store(Presence::joined, std::memory_order_release);
  return {index, memory_.slot(index).id};
}

std::size_t World::free_slot() {
  for (std::size_t i = 0; i < slots; ++i)
    if (memory_.slot(i).used == 0) return i;
  // Slots whose members died without leaving.
  for (std::size_t i = 0; i < slots; ++i) {
    if (!is_over(i, true)) continue;
    release(i);
    return i;
  }
  throw SessionError(
      fmt::format("this world has {} groups at the same time, which is the most it can have; release groups "
                  "that are no longer used",
                  slots));
}

bool World::is_over(std::size_t index, bool look_closer) {
  const auto& slot = memory_.slot(index);
  const auto* member = memory_.members(index);
  for (int rank = 0; rank < size(); ++rank) {
    if (!slot.members[static_cast<std::size_t>(rank)]) continue;
    const auto& line = memory_.rank(rank);
    bool gone = false;
    switch (member->presence.load(std::memory_order_acquire)) {
      case Presence::left:
        gone = true;
        break;
      case Presence::joined:
        gone = look_closer && liveness_.has_ended(member->identity);
        break;
      case Presence::absent:
        // A process that joins the world in the place of a dead one does not belong to the dead one's groups.
        // But the world's next incarnation may still wait for it.
        gone = look_closer &&
               (slot.parent == 0 ? line.joins >= slot.ordinal : liveness_.has_ended(identity_of_rank(rank)));
        break;
    }
    if (!gone) return false;
    ++member;
  }
  return true;
}

void World::release(std::size_t index) noexcept {
  auto& slot = memory_.slot(index);
  auto& header = memory_.header();
  slot.used = 0;
  discard_range(memory_.fd(), memory_.control_offset(index), header.control_bytes);
  discard_range(memory_.fd(), memory_.data_offset(index), header.data_bytes);
  slot.dirty = 0;
}

void World::leave(std::size_t slot, int member, bool as_world) noexcept {
  try {
    const Lock lock(*this, base::Deadline::in_seconds(timing::leave_s));
    memory_.members(slot)[member].presence.store(Presence::left, std::memory_order_release);
    ipc::wake_all(memory_.control(slot).arrivals.epoch);
    if (as_world) memory_.rank(rank_).joined = 0;
    if (is_over(slot, false)) release(slot);
  } catch (const Error&) {
    // The lock was not free in time. A process that needs the slot sees by `presence` that this member has
    // left.
    memory_.members(slot)[member].presence.store(Presence::left, std::memory_order_release);
  }
}

}  // namespace accelmgr::collective::shm
