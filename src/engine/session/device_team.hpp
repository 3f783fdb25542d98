// Which participants of an attempt sum up their gradients on their devices, over NCCL, and how they find each
// other. The host decides it, between attempts, from the records of the ranks, and writes it into the
// request: so all ranks of an attempt read the same.
//
// clang-format off
//   record of each rank: able, communicator and its ranks
//       |  plan_device_team(), in the host
//       v
//   request of the attempt: ranks of the team, and their communicator, or 0
//       |  0: the lowest rank makes an id and publishes it for the attempt; the others wait for it
//       v
//   all join, and each notes the communicator by the number of the attempt
// clang-format on
//
// A communicator goes from attempt to attempt while all of its ranks, and no others, take part with it. A
// rank that was started anew has none, and neither has one that left an attempt in the middle: the next
// attempt makes another one. Attempts have numbers that are never used again, so an id is of one team.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/session/views.hpp"

namespace accelmgr::session {

/// The team of the next attempt: the participants that are able, if there are two.
/// Requires: all participants are between attempts.
DeviceTeam plan_device_team(const Session& session, RankMask participants) noexcept;

/// Publishes the id of the team of an attempt, as its lowest rank.
void publish_team_id(const RunnerView& lowest, std::uint64_t attempt, const TeamId& id) noexcept;

/// The id that the rank has published for the team of that attempt; empty until it has.
std::optional<TeamId> published_team_id(const Session& session, int rank, std::uint64_t attempt) noexcept;

}  // namespace accelmgr::session
