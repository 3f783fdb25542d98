// Tests of what nodes that share nothing add to the contract of communicators: their network and its loss,
// memory that only ranks of one node share, and ranks that never come.
#include "two_nodes.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "expect_error.hpp"
#include "launcher/contract/collective/call.hpp"
#include "message_of.hpp"

namespace accelmgr::collective::two_nodes_test {
namespace {

using contract::Call;
using Cause = CollectiveError::Cause;
using test::expect_error;
using test::message_of;
using testing::HasSubstr;

constexpr double patient_s = 60;
constexpr double noticed_s =
    25;  ///< A death is noticed within this; nothing else ends a call before patient_s.

void expect_right(const Call& call, Communicator& world) {
  EXPECT_EQ(contract::perform(call, world, /*in_rank_order=*/false), "") << describe(call);
}

/// More data than collectives over nodes take in one part.
TEST(TwoNodes, CollectivesOfLongDataGiveWhatTheOracleSays) {
  run_on_two_nodes({.a = {0, 2}, .b = {1, 3}}, [](RankOnNode& self) {
    const auto world = self.meet(patient_s);
    constexpr std::size_t bytes = (std::size_t{17} << 20) + 12;
    expect_right({.kind = CallKind::all_reduce, .dtype = DType::float32, .count = bytes / 4}, *world);
    expect_right(
        {.kind = CallKind::all_reduce, .dtype = DType::bfloat16, .op = ReduceOp::avg, .count = bytes / 4},
        *world);
    expect_right({.kind = CallKind::broadcast, .dtype = DType::int64, .count = bytes / 8, .root = 1}, *world);
    for (const auto kind : {CallKind::all_gather, CallKind::reduce_scatter, CallKind::all_to_all})
      expect_right({.kind = kind, .dtype = DType::int32, .count = bytes / 16}, *world);
  });
}

/// The inodes of the memfds that a process has mapped.
std::set<std::string> mapped_memfds() {
  std::set<std::string> inodes;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string range, access, offset, device, inode, path;
    words >> range >> access >> offset >> device >> inode >> path;
    if (path.starts_with("/memfd:")) inodes.insert(inode);
  }
  return inodes;
}

TEST(TwoNodes, NodesShareNoMemory) {
  run_on_two_nodes({}, [](RankOnNode& self) {
    const auto world = self.meet(patient_s);
    const auto keys = world->all_gather_objects(node_key());
    EXPECT_EQ(keys[0], keys[1]);
    EXPECT_EQ(keys[2], keys[3]);
    EXPECT_NE(keys[0], keys[2]);
    const auto here = self.rank() < 2 ? std::vector{0, 1} : std::vector{2, 3};
    EXPECT_EQ(world->backend(), "gloo");
    EXPECT_EQ(world->group(here)->backend(), "shm");
    const auto own = mapped_memfds();
    const auto inodes = world->all_gather_objects(fmt::format("{}", fmt::join(own, " ")));
    EXPECT_FALSE(own.empty());
    EXPECT_EQ(inodes[0], inodes[1]);
    EXPECT_EQ(inodes[2], inodes[3]);
    std::istringstream others(inodes[self.rank() < 2 ? 2 : 0]);
    for (std::string inode; others >> inode;) EXPECT_FALSE(own.contains(inode)) << inode;
  });
}

TEST(TwoNodes, DeathOfALeaderEndsTheCallEverywhereAndTheRestFormsAgain) {
  run_on_two_nodes({.deaths = {2}}, [](RankOnNode& self) {
    const auto world = self.meet(patient_s);
    std::vector<float> data(1000);
    const auto reduce = [&] {
      world->all_reduce(data.data(), data.data(), data.size(), DType::float32, ReduceOp::sum);
    };
    world->barrier();
    if (self.rank() == 2) self.die();
    expect_error(Cause::lost, {2}, reduce);
    EXPECT_LT(self.seconds_since_death_of(2), noticed_s) << "200 ms on an idle machine";
    expect_error(Cause::broken, {2}, reduce);
    const std::vector<int> rest{0, 1, 3};
    expect_right({.kind = CallKind::all_reduce, .dtype = DType::float32, .count = 1000}, *world->group(rest));
  });
}

/// No packet arrives any more, so only their deadlines end the calls.
TEST(TwoNodes, LinkTakenDownInTheMiddleEndsTheCallByItsDeadline) {
  run_on_two_nodes({}, [](RankOnNode& self) {
    const auto world = self.meet(patient_s);
    std::vector<float> data(std::size_t{1} << 20);
    const auto reduce = [&](double timeout_s) {
      world->all_reduce(data.data(), data.data(), data.size(), DType::float32, ReduceOp::sum,
                        {.shape = {}, .timeout_s = timeout_s});
    };
    reduce(patient_s);
    const auto before = base::now_ns();
    if (self.rank() == 0) std::thread(take_link_down).detach();
    try {
      for (;;) reduce(1.5);
    } catch (const CollectiveError& error) {
      EXPECT_TRUE(error.cause() == Cause::timeout || error.cause() == Cause::lost) << error.what();
      const auto other_node = self.rank() < 2 ? std::vector{2, 3} : std::vector{0, 1};
      EXPECT_EQ(error.ranks(), other_node) << error.what();
    }
    EXPECT_LT(static_cast<double>(base::now_ns() - before) / 1e9, patient_s);
  });
}

TEST(TwoNodes, BackendShmIsRefusedWithTheRanksOfEachNode) {
  run_on_two_nodes({}, [](RankOnNode& self) {
    EXPECT_THAT(
        message_of<ConfigError>([&] { self.meet(patient_s, "shm"); }),
        HasSubstr("backend shm is for ranks on one node, but these are on 2 nodes: ranks 0, 1 | 2, 3"));
  });
}

TEST(TwoNodes, WhoDoesNotComeIsNamed) {
  run_on_two_nodes({.b = {2}}, [](RankOnNode& self) {
    if (self.rank() == 1) return;
    // The ranks that come wait for each other first, because the nodes start at different times.
    if (self.store().add("have come", 1) == self.size() - 1) self.store().set("all have come", "");
    self.store().get("all have come", base::Deadline::in_seconds(patient_s));
    // Its leader gives up, and tells the others. Those are patient: one that arrives late is not missing.
    const double timeout_s = self.rank() == 0 ? 2 : patient_s;
    expect_error(Cause::timeout, {1}, [&] { self.meet(timeout_s); });
  });
}

/// Rank 0 leaves as soon as its broadcast returns: its kernel then still holds most of the data.
TEST(TwoNodes, WhoLeavesAfterItsPartFailsNobodysLastCallOverASlowCable) {
  run_on_two_nodes({.cable_mbit = 100}, [](RankOnNode& self) {
    const Call call{.kind = CallKind::broadcast, .dtype = DType::uint8, .count = std::size_t{1} << 20};
    expect_right(call, *self.meet(patient_s));
  });
}

}  // namespace
}  // namespace accelmgr::collective::two_nodes_test
