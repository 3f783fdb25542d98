#include "engine/runner/team_part.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "accelmgr/errors.hpp"
#include "base/cuda/error.hpp"
#include "base/cuda/polling.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/device/assignment.hpp"
#include "engine/runner/batches.hpp"
#include "engine/session/device_team.hpp"

namespace accelmgr::runner {

using session::Reason;

// A join that fails leaves half of the step's time for the attempt without the team.
TeamPart::TeamPart(const Config& config, const session::RunnerView& runner, replica::Replica& replica,
                   base::Waiter& waiter)
    : view_(runner),
      record_(runner.record().device_team),
      waiter_(waiter),
      timeout_s_(std::min(timing::team_joins_s, config.step_timeout / 2)) {
  record_.communicator.store(0);
  record_.id_of.store(0);
  const auto why_not = why_in_none(config, replica);
  record_.able.store(why_not.empty() ? 1 : 0);
  if (config.runners.device == Device::cuda && !why_not.empty())
    base::log().info("gradients of this rank go through the session, not over NCCL: {}", why_not);
}

std::string TeamPart::why_in_none(const Config& config, replica::Replica& replica) {
  if (auto why = device::why_in_no_team(config, view_.rank()); !why.empty()) return why;
  try {
    member_ = replica.team_member();
  } catch (const UsageError& error) {
    return error.what();
  }
  return member_ == nullptr ? "its replica has no part in teams" : "";
}

bool TeamPart::follow(std::uint64_t attempt) {
  const auto team = view_.session().control().request.device_team;
  const bool is_member = (team.ranks >> view_.rank() & 1) != 0;
  const bool stays = is_member && team.communicator != 0 && team.communicator == record_.communicator.load();
  const bool left = !stays && leave();  // If that fails, lost_members() tells of the team that it leaves.
  note_members(is_member ? team.ranks : 0);
  under_way_ = stays;
  if (stays || !is_member) return left;
  if (team.communicator != 0)
    throw AttemptRefused{Reason::team, fmt::format("rank {} has left the team of attempt {}", view_.rank(),
                                                   team.communicator)};
  join(attempt, team.ranks);
  return true;
}

void TeamPart::note_members(session::RankMask ranks) {
  team_ = ranks;
  for (int rank = 0; rank < view_.session().ranks(); ++rank)
    if ((ranks >> rank & 1) != 0)
      generations_[static_cast<std::size_t>(rank)] = view_.session().record(rank).generation.load();
}

session::RankMask TeamPart::lost_members() const {
  session::RankMask lost = 0;
  for (int rank = 0; rank < view_.session().ranks(); ++rank) {
    if (rank == view_.rank() || (team_ >> rank & 1) == 0) continue;
    const auto& record = view_.session().record(rank);
    if (record.state.load() != session::RunnerState::ready ||
        record.generation.load() != generations_[static_cast<std::size_t>(rank)])
      lost |= session::RankMask{1} << rank;
  }
  return lost;
}

void TeamPart::join(std::uint64_t attempt, session::RankMask ranks) {
  const auto begin = base::now_ns();
  under_way_ = true;
  try {
    const auto id = id_of(attempt, __builtin_ctz(ranks));
    const double left_s = std::max(0.0, timeout_s_ - timing::seconds(base::now_ns() - begin));
    if (!member_->join(id, ranks, view_.rank(), left_s)) throw AttemptRefused{Reason::none, {}};
  } catch (const device::DeviceError& error) {
    leave();  // Throws if it is the device that has failed.
    throw AttemptRefused{Reason::team, error.what()};
  }
  record_.ranks.store(ranks);
  record_.communicator.store(attempt);
  base::log().info(
      "attempt {}: {} devices sum up their gradients over NCCL from now on; to join took {:.1f} ms", attempt,
      __builtin_popcount(ranks), double(base::now_ns() - begin) / 1e6);
}

session::TeamId TeamPart::id_of(std::uint64_t attempt, int lowest) {
  if (lowest == view_.rank()) {
    const auto id = member_->make_id();
    session::publish_team_id(view_, attempt, id);
    return id;
  }
  std::optional<session::TeamId> id;
  const auto published = [&] {
    id = session::published_team_id(view_.session(), lowest, attempt);
    return id.has_value();
  };
  switch (device::poll_until(
      published, [&] { return waiter_.wanted(); }, timeout_s_)) {
    case device::Waited::unwanted:
      throw AttemptRefused{Reason::none, {}};
    case device::Waited::late:
      throw AttemptRefused{Reason::team, fmt::format("rank {} did not publish the id of the team within {} s",
                                                     lowest, timeout_s_)};
    default:
      return *id;
  }
}

bool TeamPart::abandon() { return under_way_ && leave(); }

bool TeamPart::leave() {
  under_way_ = false;
  if (member_ == nullptr) return false;
  member_->leave();
  return record_.communicator.exchange(0) != 0;
}

}  // namespace accelmgr::runner
