// A device's membership in teams, for a replica on the transport of this floor: makes the communicator of a
// team, and has gradients and parameters use it.
#pragma once

#include <optional>
#include <string>

#include "base/cuda/device.hpp"
#include "base/cuda/device_collectives.hpp"
#include "base/cuda/nccl.hpp"
#include "engine/device/gradient_copies.hpp"
#include "engine/device/parameter_upload.hpp"
#include "engine/replica/replica.hpp"

namespace accelmgr::device {

/// Used by one thread. The constructor's arguments outlive it. Members throw DeviceError.
class TeamMember final : public replica::TeamMember {
 public:
  /// `timeout_s`: a wait for the other ranks in an attempt that takes longer means that the team hangs.
  TeamMember(Device& device, const Nccl& nccl, GradientCopies& gradients, ParameterUpload& parameters,
             base::Waiter& waiter, double timeout_s);
  ~TeamMember() override;

  session::TeamId make_id() override;
  [[nodiscard]] bool join(const session::TeamId& id, session::RankMask ranks, int rank,
                          double timeout_s) override;
  void leave() override;
  std::string failure() const override { return collectives_ ? collectives_->failure() : std::string(); }

 private:
  void end_team();

  Device& device_;
  Nccl nccl_;
  GradientCopies& gradients_;
  ParameterUpload& parameters_;
  base::Waiter& waiter_;
  double timeout_s_;
  std::optional<DeviceCollectives> collectives_;
};

}  // namespace accelmgr::device
