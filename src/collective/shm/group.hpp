// One member's view of a group: rounds, in which all members post something and nobody goes on before all
// have, and what ends them when a member does not come.
//
// Round k uses post and half number k mod 2 of each member. Who has arrived at round k + 1 has finished with
// what the others showed in round k. So what was posted in a round stays until its reader arrives at the next
// one, and one round costs one synchronization.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "collective/shm/world.hpp"
#include "collective/signature.hpp"

namespace accelmgr::collective::shm {

/// The deadline of a call. The clock is first looked at when somebody has to wait.
class Patience {
 public:
  explicit Patience(double seconds) noexcept : seconds_(seconds) {}
  double seconds() const noexcept { return seconds_; }
  base::Deadline deadline() noexcept {
    if (!deadline_) deadline_ = base::Deadline::in_seconds(seconds_);
    return *deadline_;
  }

 private:
  double seconds_;
  std::optional<base::Deadline> deadline_;
};

class Group {
 public:
  /// Of the world: `key.parent` is 0, and registers this process. Throws as World::join() and claim().
  Group(std::shared_ptr<World> world, GroupKey key, base::Deadline deadline);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  /// Leaves. In a forked child: does nothing.
  ~Group();

  int size() const noexcept { return static_cast<int>(members_.size()); }
  int me() const noexcept { return me_; }
  std::uint64_t id() const noexcept { return claim_.id; }
  World& world() noexcept { return *world_; }
  const std::shared_ptr<World>& shared_world() const noexcept { return world_; }
  /// Ranks of this host's world; and of the world of all hosts.
  const std::vector<int>& members() const noexcept { return members_; }
  const std::vector<int>& world_ranks() const noexcept { return world_ranks_; }

  /// Waits until all members have joined. Throws CollectiveError.
  void wait_joined(const Signature& signature, Patience& patience);

  /// Throws what ended the group: as this member's call would have, the first time that it hears of it, then
  /// CollectiveError{broken}.
  void check_usable(const Signature& signature, const Patience& patience);
  /// Throws UsageError in a forked child.
  void check_process(std::string_view call) const;

  /// What a half holds.
  std::size_t half_bytes() const noexcept { return half_bytes_; }
  /// My half of the next round; `bytes` of it have memory. Throws SessionError when there is too little.
  std::byte* next_half(std::size_t bytes);
  /// Posts the next round and waits until all have. Throws CollectiveError.
  void exchange(const Signature& signature, Patience& patience);
  /// The same in the first round of a call: throws CollectiveError{mismatch} too, after which the group is
  /// as usable as before.
  void exchange_first(const Signature& signature, std::uint64_t length, Patience& patience);
  /// Of the last round.
  const std::byte* half(int member) const noexcept { return half_of(member, round_); }
  std::uint64_t length(int member) const noexcept { return post_of(member, round_).length; }

  Mailbox& mailbox(int from, int to);
  /// For one who deals with one member only, before and between two slices of a wait: throws when the group
  /// has failed, when patience is at its end, and (`closer`) when that member has ended or left. `call` is
  /// for the message.
  /// `waits` is asked again after that member was found gone: what it did before its end counts, and nobody
  /// is told that it is missing.
  void look_after(int member, bool closer, const std::function<bool()>& waits, std::string_view call,
                  Patience& patience);
  int spin_us() const noexcept { return world_->spin_us(); }

  /// Nobody can go on: this member throws in the middle of a call.
  void give_up() noexcept;

 private:
  enum class Verdict : std::uint32_t { none, lost, left, timeout };
  using Mask = std::vector<std::uint64_t>;

  const Post& post_of(int member, std::uint64_t round) const noexcept {
    return table_[member].post[round & 1u];
  }
  std::byte* half_of(int member, std::uint64_t round) const noexcept {
    return data_.data() + (2 * static_cast<std::size_t>(member) + (round & 1u)) * half_bytes_;
  }
  void arrive() noexcept;
  void wait_arrived(const Signature& signature, Patience& patience);
  void compare(const Signature& signature) const;
  /// Waits until ready(i) for all members i.
  template <class Ready>
  void wait(Ready ready, const Signature& signature, Patience& patience);
  /// Between two slices of a wait: throws when the wait is hopeless. `closer`: at processes as well.
  template <class Ready>
  void look(Ready ready, bool closer, const Signature& signature, Patience& patience);
  bool has_left(int member) const noexcept;
  bool has_ended(int member);
  /// The first verdict is the one that counts. It wakes all.
  void fail(Verdict verdict, const std::vector<int>& members) noexcept;
  [[noreturn]] void throw_verdict(const Signature& signature, double timeout_s);
  [[noreturn]] void throw_verdict(std::string_view call, double timeout_s);
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
  bool told_ = false;  ///< The verdict, to this member's caller.
  std::size_t half_bytes_;
  std::size_t half_has_bytes_ = 0;  ///< With memory, of each of my halves.
  std::vector<bool> mailboxes_;     ///< With memory, as far as this member knows; [from][to].
};

}  // namespace accelmgr::collective::shm
