#include "engine/device/team_member.hpp"

#include <cstring>

namespace accelmgr::device {

static_assert(sizeof(NcclId) == sizeof(session::TeamId));

TeamMember::TeamMember(Device& device, const Nccl& nccl, GradientCopies& gradients,
                       ParameterUpload& parameters, base::Waiter& waiter, double timeout_s)
    : device_(device),
      nccl_(nccl),
      gradients_(gradients),
      parameters_(parameters),
      waiter_(waiter),
      timeout_s_(timeout_s) {}

TeamMember::~TeamMember() { end_team(); }

session::TeamId TeamMember::make_id() {
  const auto made = DeviceCollectives::make_id(nccl_);
  session::TeamId id;
  std::memcpy(id.data(), &made, sizeof made);
  return id;
}

bool TeamMember::join(const session::TeamId& id, session::RankMask ranks, int rank, double timeout_s) {
  end_team();
  NcclId of_team{};
  std::memcpy(&of_team, id.data(), sizeof of_team);
  const int position = __builtin_popcount(ranks & ((session::RankMask{1} << rank) - 1));
  collectives_.emplace(device_, nccl_, of_team, position, __builtin_popcount(ranks), waiter_, timeout_s_);
  if (!collectives_->connect(timeout_s)) return false;
  gradients_.join(*collectives_);
  parameters_.join(*collectives_);
  return true;
}

// The others have left, too, or are gone. So the communicator is aborted: an orderly end would need all of
// them.
void TeamMember::end_team() {
  if (collectives_) collectives_->abort();
  gradients_.leave();
  parameters_.leave();
  collectives_.reset();
}

// A peer that has died may have broken this device. Report it here, not in the next attempt.
void TeamMember::leave() {
  if (!collectives_) return;
  end_team();
  device_.look();
}

}  // namespace accelmgr::device
