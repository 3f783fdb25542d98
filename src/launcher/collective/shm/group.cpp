#include "launcher/collective/shm/group.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/interruption.hpp"
#include "base/ipc/spin.hpp"
#include "base/timing.hpp"
#include "launcher/collective/signature/argument_checks.hpp"

namespace accelmgr::collective::shm {
namespace {

using Cause = CollectiveError::Cause;

constexpr std::size_t first_bytes = 16 * 1024;  ///< The least memory that a half gets.

std::size_t bytes_of_dimensions(const Signature& signature) noexcept {
  return offsetof(Signature, shape) + signature.dimensions * sizeof(signature.shape[0]);
}

}  // namespace

Group::Group(std::shared_ptr<World> world, GroupKey key, base::Deadline deadline)
    : world_(std::move(world)),
      members_(std::move(key.members)),
      is_world_(key.parent == 0),
      half_bytes_(world_->memory().header().half_bytes) {
  const auto mine = std::lower_bound(members_.begin(), members_.end(), world_->rank());
  me_ = static_cast<int>(mine - members_.begin());
  for (int member : members_) world_ranks_.push_back(world_->world_rank(member));
  claim_ = is_world_ ? world_->join() : world_->claim({key.parent, key.ordinal, members_}, deadline);
  try {
    auto& memory = world_->memory();
    control_ = &memory.control(claim_.slot);
    table_ = memory.members(claim_.slot);
    data_ = ipc::Mapping(memory.fd(), memory.data_offset(claim_.slot), memory.header().data_bytes,
                         ipc::Access::read_write);
  } catch (...) {
    world_->leave(claim_.slot, me_, is_world_);
    throw;
  }
}

Group::~Group() {
  if (!world_->inherited()) world_->leave(claim_.slot, me_, is_world_);
}

void Group::check_usable(const Signature& signature, const base::Patience& patience) {
  if (world_->inherited()) check_process(describe(signature));
  if (verdict() == Verdict::none) return;
  if (told_) throw missing_ranks(Cause::broken, numbered(signature), ranks_of_verdict(), 0);
  throw_verdict(signature, patience.seconds());
}

void Group::check_process(std::string_view call) const {
  if (world_->inherited()) throw of_another_process(call);
}

std::byte* Group::next_half(std::size_t bytes) {
  if (bytes > half_has_bytes_) {
    const auto enough = std::min(std::max(ipc::whole_pages(bytes), first_bytes), half_bytes_);
    for (const std::uint64_t round : {0, 1}) {
      const auto offset = static_cast<std::uint64_t>(half_of(me_, round) - data_.data());
      allocate_range(world_->memory().fd(), world_->memory().data_offset(claim_.slot) + offset, enough);
    }
    half_has_bytes_ = enough;
  }
  return half_of(me_, round_ + 1);
}

void Group::exchange_first(const Signature& signature, std::uint64_t length, const base::Patience& patience) {
  auto& post = table_[me_].post[(round_ + 1) & 1u];
  std::copy_n(reinterpret_cast<const std::byte*>(&signature), bytes_of_dimensions(signature),
              reinterpret_cast<std::byte*>(&post.signature));
  if (signature.kind == CallKind::all_gather_objects || signature.kind == CallKind::broadcast_object)
    post.length = length;
  exchange(signature, patience);
  compare(signature);
}

void Group::exchange(const Signature& signature, const base::Patience& patience) {
  ++round_;
  arrive();
  wait(signature, patience);
}

// A parked member waits for all others, so only the member that completes the round has to wake them. Of two
// members that arrive at the same time at least one sees that all have arrived.
void Group::arrive() noexcept {
  table_[me_].post[round_ & 1u].round.exchange(round_, std::memory_order_seq_cst);
  if (!anybody_parked(control_->arrivals)) return;
  for (int member = 0; member < size(); ++member)
    if (post_of(member, round_).round.load(std::memory_order_seq_cst) < round_) return;
  ipc::wake_all(control_->arrivals.epoch);
}

void Group::compare(const Signature& signature) const {
  const auto bytes = bytes_of_dimensions(signature);
  bool same = true;
  for (int member = 0; member < size(); ++member)
    same &= std::memcmp(&post_of(member, round_).signature, &signature, bytes) == 0;
  if (same) return;
  std::vector<Signature> posted(members_.size());
  for (int member = 0; member < size(); ++member) {
    const auto& theirs = post_of(member, round_).signature;
    posted[static_cast<std::size_t>(member)] = Signature{};
    std::memcpy(&posted[static_cast<std::size_t>(member)], &theirs, bytes_of_dimensions(theirs));
  }
  check_same(posted, world_ranks_);
}

void Group::wait_joined(const Signature& signature, const base::Patience& patience) {
  // Members that came earlier may have given up. That is the failure of this call too.
  if (verdict() != Verdict::none) throw_verdict(signature, patience.seconds());
  exchange(signature, patience);
  // All members have joined, but one of them may have given up since.
  if (verdict() != Verdict::none) throw_verdict(signature, patience.seconds());
}

void Group::wait(const Signature& signature, const base::Patience& patience) {
  int next = 0;  // All members before this one have arrived.
  const auto all_arrived = [&] {
    while (next < size() && has_arrived(next)) ++next;
    return next == size();
  };
  if (ipc::spin(all_arrived, world_->spin_us() * 1000LL)) return;
  const auto until = patience.deadline();
  for (bool closer = false;;) {
    Parked parked(control_->arrivals);
    if (all_arrived()) return;
    look(closer, signature, patience);
    closer = !parked.wait(std::min(timing::look_ns, until.remaining_ns()));
  }
}

void Group::look(bool closer, const Signature& signature, const base::Patience& patience) {
  if (verdict() == Verdict::none) judge(closer, patience);
  if (verdict() == Verdict::none) return;
  // What ended the group does not concern this wait if all members have come to it.
  if (!missing([](int) { return true; }).empty()) throw_verdict(signature, patience.seconds());
}

void Group::judge(bool closer, const base::Patience& patience) {
  const auto left = missing([this](int member) { return has_left(member); });
  if (closer) {
    const auto ended = missing([this](int member) { return has_ended(member); });
    if (!ended.empty()) return fail(Verdict::lost, ended);
  }
  if (!left.empty()) return fail(Verdict::left, left);
  if (patience.deadline().passed() || (closer && base::interrupted())) {
    const auto late = missing([](int) { return true; });
    if (!late.empty()) fail(Verdict::timeout, late);  // They may all have come while the hook ran.
  }
}

// has_arrived() is asked again afterwards: a member may arrive, then leave or die, while this loop looks at
// it.
template <class Gone>
std::vector<int> Group::missing(Gone gone) const {
  std::vector<int> members;
  for (int member = 0; member < size(); ++member)
    if (!has_arrived(member) && gone(member) && !has_arrived(member)) members.push_back(member);
  return members;
}

bool Group::has_left(int member) const noexcept {
  return table_[member].presence.load(std::memory_order_acquire) == Presence::left;
}

bool Group::has_ended(int member) {
  if (table_[member].presence.load(std::memory_order_acquire) != Presence::absent)
    return world_->liveness().has_ended(table_[member].identity);
  // In the world itself, a later process may still join in the place of the one that has ended.
  return !is_world_ &&
         world_->liveness().has_ended(world_->identity_of_rank(members_[static_cast<std::size_t>(member)]));
}

std::vector<int> Group::gone() {
  std::vector<int> ranks;
  for (int member = 0; member < size(); ++member)
    if (member != me_ && (has_left(member) || has_ended(member)))
      ranks.push_back(world_ranks_[static_cast<std::size_t>(member)]);
  return ranks;
}

void Group::give_up() noexcept { fail(Verdict::lost, {me_}); }

// `missing` is complete before the word that points to it. So a member that is killed in between leaves no
// verdict.
void Group::fail(Verdict verdict, const std::vector<int>& members) noexcept {
  auto& missing = table_[me_].missing;
  std::uint64_t none = 0;
  if (control_->verdict.load(std::memory_order_acquire) == none) {
    missing.reset();
    for (int member : members) missing[static_cast<std::size_t>(member)] = true;
    const auto word = static_cast<std::uint64_t>(verdict) << 32 | static_cast<std::uint32_t>(me_);
    control_->verdict.compare_exchange_strong(none, word, std::memory_order_acq_rel);
  }
  ipc::wake_all(control_->arrivals.epoch);
}

Group::Verdict Group::verdict() const noexcept {
  return static_cast<Verdict>(control_->verdict.load(std::memory_order_acquire) >> 32);
}

std::vector<int> Group::ranks_of_verdict() const {
  const auto by = static_cast<int>(control_->verdict.load(std::memory_order_acquire) & 0xffffffffu);
  const auto& missing = table_[by].missing;
  std::vector<int> ranks;
  for (std::size_t member = 0; member < members_.size(); ++member)
    if (missing[member]) ranks.push_back(world_ranks_[member]);
  return ranks;
}

void Group::throw_verdict(const Signature& signature, double timeout_s) {
  told_ = true;
  const auto call = numbered(signature);
  auto ranks = ranks_of_verdict();
  if (verdict() == Verdict::left) {
    const auto who = names_of(ranks);
    const char* have = ranks.size() == 1 ? "has" : "have";
    throw CollectiveError(fmt::format("{}: {} {} left this communicator", call, who, have), Cause::lost,
                          std::move(ranks));
  }
  throw missing_ranks(verdict() == Verdict::timeout ? Cause::timeout : Cause::lost, call, std::move(ranks),
                      timeout_s);
}

}  // namespace accelmgr::collective::shm
