#include "engine/session/device_team.hpp"

#include <cstring>

namespace accelmgr::session {

DeviceTeam plan_device_team(const Session& session, RankMask participants) noexcept {
  DeviceTeam team;
  for (int rank = 0; rank < session.ranks(); ++rank)
    if ((participants >> rank & 1) != 0 && session.record(rank).device_team.able.load() != 0)
      team.ranks |= RankMask{1} << rank;
  if (__builtin_popcount(team.ranks) < 2) return {};
  team.communicator = session.record(__builtin_ctz(team.ranks)).device_team.communicator.load();
  for (int rank = 0; rank < session.ranks(); ++rank) {
    if ((team.ranks >> rank & 1) == 0) continue;
    const auto& own = session.record(rank).device_team;
    if (own.communicator.load() != team.communicator || own.ranks.load() != team.ranks) team.communicator = 0;
  }
  return team;
}

// A sequence lock. A rank that a resize has removed may still read when the next team's id is written.
void publish_team_id(const RunnerView& lowest, std::uint64_t attempt, const TeamId& id) noexcept {
  auto& record = lowest.record().device_team;
  record.id_of.store(0);
  for (std::size_t i = 0; i < std::size(record.id); ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, id.data() + i * sizeof word, sizeof word);
    record.id[i].store(word);
  }
  record.id_of.store(attempt);
}

std::optional<TeamId> published_team_id(const Session& session, int rank, std::uint64_t attempt) noexcept {
  const auto& record = session.record(rank).device_team;
  if (record.id_of.load() != attempt) return std::nullopt;
  TeamId id;
  for (std::size_t i = 0; i < std::size(record.id); ++i) {
    const auto word = record.id[i].load();
    std::memcpy(id.data() + i * sizeof word, &word, sizeof word);
  }
  if (record.id_of.load() != attempt) return std::nullopt;
  return id;
}

}  // namespace accelmgr::session
