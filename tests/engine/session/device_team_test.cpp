// Tests of the team of devices that the host plans, and of ids that a reader gets whole or not at all.
#include "engine/session/device_team.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "session_support.hpp"

namespace accelmgr::session {
namespace {

class Planned : public testing::Test {
 protected:
  void says(int rank, bool able, std::uint64_t communicator = 0, RankMask ranks = 0) {
    auto& record = RunnerView(small_.session, rank).record().device_team;
    record.able.store(able ? 1 : 0);
    record.communicator.store(communicator);
    record.ranks.store(ranks);
  }
  DeviceTeam of(RankMask participants) const { return plan_device_team(small_.session, participants); }

  SmallSession small_ = small_session(4, {8});
};

TEST_F(Planned, TeamsHaveTheParticipantsThatAreAble) {
  for (const int rank : {0, 2, 3}) says(rank, true);
  EXPECT_EQ(of(0b1111), (DeviceTeam{0b1101, 0}));
  EXPECT_EQ(of(0b1010), DeviceTeam{}) << "one alone is no team";
  EXPECT_EQ(of(0b0010), DeviceTeam{});
}

TEST_F(Planned, TeamsKeepACommunicatorThatAllOfThemHaveAndNobodyElse) {
  for (const int rank : {0, 1, 2}) says(rank, true, 7, 0b0111);
  EXPECT_EQ(of(0b1111), (DeviceTeam{0b0111, 7}));
  EXPECT_EQ(of(0b0011), (DeviceTeam{0b0011, 0})) << "it has three ranks";
  says(1, true, 9, 0b0111);
  EXPECT_EQ(of(0b0111), (DeviceTeam{0b0111, 0}));
  says(1, true);
  EXPECT_EQ(of(0b0111), (DeviceTeam{0b0111, 0})) << "a replacement has none";
  says(3, true, 8, 0b1001);
  says(0, true, 8, 0b1001);
  EXPECT_EQ(of(0b1001), (DeviceTeam{0b1001, 8}));
}

TeamId filled(std::uint64_t attempt) {
  TeamId id;
  id.fill(static_cast<std::byte>(attempt));
  return id;
}

TEST(TeamId, IsOfOneAttempt) {
  auto small = small_session(2, {8});
  const RunnerView lowest(small.session, 1);
  EXPECT_FALSE(published_team_id(small.session, 1, 5));
  publish_team_id(lowest, 5, filled(5));
  EXPECT_EQ(published_team_id(small.session, 1, 5), filled(5));
  EXPECT_FALSE(published_team_id(small.session, 1, 4));
  EXPECT_FALSE(published_team_id(small.session, 0, 5));
  publish_team_id(lowest, 6, filled(6));
  EXPECT_FALSE(published_team_id(small.session, 1, 5));
}

TEST(TeamId, IsReadWholeWhileTheNextOnesAreWritten) {
  constexpr std::uint64_t last = 20'000;
  auto small = small_session(1, {8});
  std::thread writer([&] {
    for (std::uint64_t attempt = 1; attempt <= last; ++attempt)
      publish_team_id({small.session, 0}, attempt, filled(attempt));
  });
  for (std::uint64_t attempt = 1; attempt < last;) {
    attempt = std::max(attempt, small.session.record(0).device_team.id_of.load());
    const auto id = published_team_id(small.session, 0, attempt);
    EXPECT_TRUE(!id || *id == filled(attempt));
  }
  writer.join();
}

}  // namespace
}  // namespace accelmgr::session
