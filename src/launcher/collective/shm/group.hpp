// One member's view of a group. A group works in rounds: every member posts something, and no member goes on
// before all have posted. A member that does not come ends the group.
//
// Round k uses post and half number k mod 2 of each member. A member that has arrived at round k + 1 has
// finished reading what the others posted in round k. So what is posted in a round stays until all its
// readers arrive at the next one, and a round costs one synchronization.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/patience.hpp"
#include "base/unmovable.hpp"
#include "launcher/collective/shm/world.hpp"
#include "launcher/collective/signature/signature.hpp"

namespace accelmgr::collective::shm {

class Group : base::Unmovable {
 public:
  /// Joins a group. If `key.parent` is 0 this is the world, and this process is registered as its rank.
  /// Throws as World::join() and World::claim() do.
  Group(std::shared_ptr<World> world, GroupKey key, base::Deadline deadline);
  /// Leaves the group. Does nothing in a forked child.
  ~Group();

  int size() const noexcept { return static_cast<int>(members_.size()); }
  int me() const noexcept { return me_; }
  std::uint64_t id() const noexcept { return claim_.id; }
  World& world() noexcept { return *world_; }
  const std::shared_ptr<World>& shared_world() const noexcept { return world_; }
  /// Ranks in this node's world, and in the world of all nodes.
  const std::vector<int>& members() const noexcept { return members_; }
  const std::vector<int>& world_ranks() const noexcept { return world_ranks_; }

  /// The first round, which posts nothing: blocks until all members have joined. Throws CollectiveError.
  void wait_joined(const Signature& signature, const base::Patience& patience);

  /// Throws if the group has ended: the first time the error that ended it, as if this call had met it; later
  /// CollectiveError{broken}.
  void check_usable(const Signature& signature, const base::Patience& patience);
  /// Throws UsageError in a forked child.
  void check_process(std::string_view call) const;

  /// Capacity of a half.
  std::size_t half_bytes() const noexcept { return half_bytes_; }
  /// Returns this member's half of the next round, with memory for `bytes` bytes. Throws SessionError when
  /// there is too little memory.
  std::byte* next_half(std::size_t bytes);
  /// Posts the next round and blocks until all members have posted it. Throws CollectiveError.
  void exchange(const Signature& signature, const base::Patience& patience);
  /// Like exchange(), for the first round of a call. Also throws CollectiveError{mismatch}; the group stays
  /// usable after that.
  void exchange_first(const Signature& signature, std::uint64_t length, const base::Patience& patience);
  /// Half and length that a member posted in the last round.
  const std::byte* half(int member) const noexcept { return half_of(member, round_); }
  std::uint64_t length(int member) const noexcept { return post_of(member, round_).length; }

  /// The ranks in the world of all nodes of members that have ended or left.
  std::vector<int> gone();

  /// Ends the group because this member throws in the middle of a call.
  void give_up() noexcept;

 private:
  enum class Verdict : std::uint32_t { none, lost, left, timeout };

  const Post& post_of(int member, std::uint64_t round) const noexcept {
    return table_[member].post[round & 1u];
  }
  bool has_arrived(int member) const noexcept {  // In the total order: see parking.hpp.
    return post_of(member, round_).round.load(std::memory_order_seq_cst) == round_;
  }
  std::byte* half_of(int member, std::uint64_t round) const noexcept {
    return data_.data() + (2 * static_cast<std::size_t>(member) + (round & 1u)) * half_bytes_;
  }
  void arrive() noexcept;
  void compare(const Signature& signature) const;
  /// Blocks until all members have arrived at this round.
  void wait(const Signature& signature, const base::Patience& patience);
  /// Called between two slices of a wait: throws when the wait cannot succeed. `closer` also checks whether
  /// processes have ended.
  void look(bool closer, const Signature& signature, const base::Patience& patience);
  /// Sets the verdict if a member that is waited for has ended or left, or patience is over.
  void judge(bool closer, const base::Patience& patience);
  /// The members that have not arrived and for which gone(i) is true.
  template <class Gone>
  std::vector<int> missing(Gone gone) const;
  bool has_left(int member) const noexcept;
  bool has_ended(int member);
  /// Sets the verdict and wakes all members. The first verdict counts.
  void fail(Verdict verdict, const std::vector<int>& members) noexcept;
  [[noreturn]] void throw_verdict(const Signature& signature, double timeout_s);
  Verdict verdict() const noexcept;
  std::vector<int> ranks_of_verdict() const;

  std::shared_ptr<World> world_;
  std::vector<int> members_;
  std::vector<int> world_ranks_;
  int me_ = 0;
  bool is_world_;
  Claim claim_{};
  Control* control_ = nullptr;
  Member* table_ = nullptr;
  ipc::Mapping data_;
  std::uint64_t round_ = 0;
  bool told_ = false;  ///< The verdict was thrown to this member's caller.
  std::size_t half_bytes_;
  std::size_t half_has_bytes_ = 0;  ///< How much of each of this member's halves has memory.
};

}  // namespace accelmgr::collective::shm
