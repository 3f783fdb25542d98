// Tests of ranks on two hosts: their collectives, and how their calls end when a rank, a leader or the link
// is lost.
#include "two_hosts.hpp"

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
#include "launcher/contract/collective/call.hpp"
#include "message_of.hpp"

namespace accelmgr::collective::hosts_test {
namespace {

using contract::Call;
using Cause = CollectiveError::Cause;
using test::message_of;
using testing::HasSubstr;

constexpr double patient_s = 60;
constexpr double noticed_s =
    25;  ///< A death is noticed within this; nothing else ends a call before patient_s.

#define SCENARIO(name, ...)                                                               \
  void name(RankOnHost& self);                                                            \
  const Registered name##_registered(#name, Entry{&name, std::vector<int>{__VA_ARGS__}}); \
  void name(RankOnHost& self)

/// Each host reduces the data of its own ranks first, so floating point results differ in the last bits from
/// those of rank order.
double tolerance_of(DType dtype) {
  switch (dtype) {
    case DType::bfloat16:
      return 1e-2;
    case DType::float16:
      return 1e-3;
    case DType::float32:
    case DType::complex64:
      return 1e-6;
    default:
      return 1e-13;
  }
}

void expect_right(const Call& call, Communicator& world) {
  EXPECT_EQ(contract::perform(call, world, tolerance_of(call.dtype)), "") << describe(call);
}

/// Checks that `call` fails on this rank with `cause` and names `ranks`.
void expect_failure(Cause cause, const std::vector<int>& ranks, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "the call did not fail";
  } catch (const CollectiveError& error) {
    EXPECT_EQ(error.cause(), cause) << error.what();
    EXPECT_EQ(error.ranks(), ranks) << error.what();
  }
}

SCENARIO(Collectives) {
  const auto world = self.meet(patient_s);
  EXPECT_EQ(world->backend(), "gloo");
  EXPECT_EQ(world->rank(), self.rank());
  std::uint64_t seed = 0;
  for (const auto dtype : contract::all_dtypes)
    for (const auto op : contract::all_ops)
      for (const auto kind : {CallKind::all_reduce, CallKind::reduce_scatter})
        if (contract::makes_sense(dtype, op))
          expect_right({.kind = kind,
                        .dtype = dtype,
                        .op = op,
                        .count = 61,
                        .in_place = ++seed % 2 == 0,
                        .seed = seed},
                       *world);
  for (const auto kind : {CallKind::all_gather, CallKind::broadcast, CallKind::all_to_all})
    for (const std::size_t count : {0, 1, 4099})
      for (int root = 0; root < (kind == CallKind::broadcast ? self.size() : 1); ++root)
        expect_right({.kind = kind,
                      .dtype = DType::int16,
                      .count = count,
                      .root = root,
                      .in_place = ++seed % 2 == 0,
                      .seed = seed},
                     *world);
  world->barrier();
}

/// More data than collectives over hosts take in one part.
SCENARIO(LongCollectives) {
  const auto world = self.meet(patient_s);
  constexpr std::size_t bytes = (std::size_t{17} << 20) + 12;
  expect_right({.kind = CallKind::all_reduce, .dtype = DType::float32, .count = bytes / 4}, *world);
  expect_right(
      {.kind = CallKind::all_reduce, .dtype = DType::bfloat16, .op = ReduceOp::avg, .count = bytes / 4},
      *world);
  expect_right({.kind = CallKind::broadcast, .dtype = DType::int64, .count = bytes / 8, .root = 1}, *world);
  for (const auto kind : {CallKind::all_gather, CallKind::reduce_scatter, CallKind::all_to_all})
    expect_right({.kind = kind, .dtype = DType::int32, .count = bytes / 16}, *world);
}

SCENARIO(Objects) {
  const auto world = self.meet(patient_s);
  const auto object_of = [](int rank) {
    return std::string(static_cast<std::size_t>(rank) * 100'000, 'a' + rank);
  };
  const auto objects = world->all_gather_objects(object_of(self.rank()));
  ASSERT_EQ(objects.size(), static_cast<std::size_t>(self.size()));
  for (int rank = 0; rank < self.size(); ++rank) EXPECT_TRUE(objects[rank] == object_of(rank)) << rank;
  for (int root = 0; root < self.size(); ++root)
    EXPECT_TRUE(world->broadcast_object(root == self.rank() ? object_of(root) : "", root) == object_of(root));
}

SCENARIO(Groups) {
  const auto world = self.meet(patient_s);
  // A group across the hosts, whose leaders are not those of the world; a group nested in it; a group within
  // each host.
  std::vector<int> odd;
  for (int rank = 1; rank < self.size(); rank += 2) odd.push_back(rank);
  if (self.rank() % 2 == 1) {
    const auto group = world->group(odd);
    EXPECT_EQ(group->backend(), "gloo");
    EXPECT_EQ(group->ranks(), odd);
    expect_right({.kind = CallKind::all_reduce, .dtype = DType::int32, .count = 1000}, *group);
    const std::vector<int> all_of_them{0, 1};
    expect_right({.kind = CallKind::all_gather, .dtype = DType::int32, .count = 10},
                 *group->group(all_of_them));
    expect_right({.kind = CallKind::all_gather, .dtype = DType::int32, .count = 10}, *world->group(odd));
  }
  const auto here = self.rank() < 2 ? std::vector{0, 1} : std::vector{2, 3};
  const auto group = world->group(here);
  EXPECT_EQ(group->backend(), "shm");
  EXPECT_EQ(group->ranks(), here);
  expect_right({.kind = CallKind::all_reduce, .dtype = DType::float32, .count = 1000}, *group);
  expect_right({.kind = CallKind::all_reduce, .dtype = DType::int32, .count = 1000}, *world);
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

SCENARIO(SharedMemory) {
  const auto world = self.meet(patient_s);
  const auto keys = world->all_gather_objects(host_key());
  EXPECT_EQ(keys[0], keys[1]);
  EXPECT_EQ(keys[2], keys[3]);
  EXPECT_NE(keys[0], keys[2]);
  const auto own = mapped_memfds();
  const auto inodes = world->all_gather_objects(fmt::format("{}", fmt::join(own, " ")));
  EXPECT_FALSE(own.empty());
  EXPECT_EQ(inodes[0], inodes[1]);
  EXPECT_EQ(inodes[2], inodes[3]);
  std::istringstream others(inodes[self.rank() < 2 ? 2 : 0]);
  for (std::string inode; others >> inode;) EXPECT_FALSE(own.contains(inode)) << inode;
}

SCENARIO(Mismatch) {
  const auto world = self.meet(patient_s);
  std::vector<float> in(6, 1), out(6, -1);
  const auto shape = self.rank() == 3 ? std::vector<std::int64_t>{2, 3} : std::vector<std::int64_t>{6};
  expect_failure(Cause::mismatch, {3}, [&] {
    world->all_reduce(in.data(), out.data(), 6, DType::float32, ReduceOp::sum, {.shape = shape});
  });
  EXPECT_EQ(out, std::vector<float>(6, -1)) << "data was touched";
  expect_right({.kind = CallKind::all_reduce, .dtype = DType::float32, .count = 10}, *world);
}

void expect_without_and_form_again(RankOnHost& self, Communicator& world, int dead) {
  std::vector<float> data(1000);
  const auto reduce = [&] {
    world.all_reduce(data.data(), data.data(), 1000, DType::float32, ReduceOp::sum);
  };
  expect_failure(Cause::lost, {dead}, reduce);
  EXPECT_LT(self.seconds_since_death_of(dead), noticed_s) << "200 ms on an idle machine";
  expect_failure(Cause::broken, {dead}, reduce);
  std::vector<int> rest;
  for (int rank = 0; rank < self.size(); ++rank)
    if (rank != dead) rest.push_back(rank);
  const auto group = world.group(rest);
  expect_right({.kind = CallKind::all_reduce, .dtype = DType::float32, .count = 1000}, *group);
}

SCENARIO(KilledRank, 3) {
  const auto world = self.meet(patient_s);
  world->barrier();
  if (self.rank() == 3) self.die();
  expect_without_and_form_again(self, *world, 3);
}

SCENARIO(KilledLeader, 2) {
  const auto world = self.meet(patient_s);
  world->barrier();
  if (self.rank() == 2) self.die();
  expect_without_and_form_again(self, *world, 2);
}

SCENARIO(KilledInTheMiddle, 0) {
  const auto world = self.meet(patient_s);
  std::vector<float> data(std::size_t{16} << 20);
  const auto reduce = [&] {
    world->all_reduce(data.data(), data.data(), data.size(), DType::float32, ReduceOp::sum);
  };
  if (self.rank() == 0) {
    std::thread([&] {
      self.store().get("under way", base::Deadline::in_seconds(patient_s));
      self.die();
    }).detach();
    for (;;) reduce();
  }
  if (self.rank() == 1) self.store().set("under way", "");
  expect_failure(Cause::lost, {0}, [&] {
    for (;;) reduce();
  });
  EXPECT_LT(self.seconds_since_death_of(0), noticed_s)
      << "200 ms on an idle machine; a part of the data at most";
}

SCENARIO(KilledBeforeAGroup, 1) {
  const auto world = self.meet(patient_s);
  world->barrier();
  if (self.rank() == 1) self.die();
  const std::vector<int> all{0, 1, 2, 3};
  expect_failure(Cause::lost, {1}, [&] { world->group(all); });
  EXPECT_LT(self.seconds_since_death_of(1), noticed_s);
}

SCENARIO(LateRank) {
  const auto world = self.meet(patient_s);
  world->barrier();
  if (self.rank() == 3)
    return static_cast<void>(self.store().get("all have given up", base::Deadline::in_seconds(patient_s)));
  expect_failure(Cause::timeout, {3}, [&] { world->barrier({.shape = {}, .timeout_s = 2}); });
  if (self.store().add("given up", 1) == 3) self.store().set("all have given up", "");
}

/// No packet arrives any more, so only their deadlines end the calls.
SCENARIO(LinkDown) {
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
    const auto other_host = self.rank() < 2 ? std::vector{2, 3} : std::vector{0, 1};
    EXPECT_EQ(error.ranks(), other_host) << error.what();
  }
  EXPECT_LT(static_cast<double>(base::now_ns() - before) / 1e9, patient_s);
}

SCENARIO(NoSharedMemoryBetweenHosts) {
  EXPECT_THAT(message_of<ConfigError>([&] { self.meet(patient_s, "shm"); }),
              HasSubstr("backend shm is for ranks on one host, but these are on 2 hosts: ranks 0, 1 | 2, 3"));
}

SCENARIO(OneNeverCame) {
  if (self.rank() == 1) return;
  // The ranks that come wait for each other first, because the hosts start at different times.
  if (self.store().add("have come", 1) == self.size() - 1) self.store().set("all have come", "");
  self.store().get("all have come", base::Deadline::in_seconds(patient_s));
  // Its leader gives up, and tells the others. Those are patient: one that arrives late is not missing.
  const double timeout_s = self.rank() == 0 ? 2 : patient_s;
  expect_failure(Cause::timeout, {1}, [&] { self.meet(timeout_s); });
}

/// Rank 0 leaves as soon as its broadcast returns: its kernel then still holds most of the data.
SCENARIO(LastCalls) {
  const Call call{.kind = CallKind::broadcast, .dtype = DType::uint8, .count = std::size_t{1} << 20};
  expect_right(call, *self.meet(patient_s));
}

TEST(TwoHosts, EveryCollectiveGivesWhatTheOracleSays) { run_on_two_hosts("Collectives", {0, 1}, {2, 3}); }
TEST(TwoHosts, UnequalHostsDoSoToo) { run_on_two_hosts("Collectives", {0, 1, 2}, {3}); }
TEST(TwoHosts, RanksThatTakeTurnsOverTheHostsDoSoToo) { run_on_two_hosts("Collectives", {0, 2, 4}, {1, 3}); }
TEST(TwoHosts, LongDataGoesInParts) { run_on_two_hosts("LongCollectives", {0, 2}, {1, 3}); }
TEST(TwoHosts, ObjectsGoFromAnyRankToAny) { run_on_two_hosts("Objects", {0, 2}, {1, 3}); }
TEST(TwoHosts, GroupsAcrossAndWithinHosts) { run_on_two_hosts("Groups", {0, 1}, {2, 3}); }
TEST(TwoHosts, HostsShareNoMemory) { run_on_two_hosts("SharedMemory", {0, 1}, {2, 3}); }
TEST(TwoHosts, MismatchIsToldBeforeDataIsTouchedAndHarmsNothing) {
  run_on_two_hosts("Mismatch", {0, 1}, {2, 3});
}
TEST(TwoHosts, DeathOfARankEndsTheCallEverywhereAndTheRestFormsAgain) {
  run_on_two_hosts("KilledRank", {0, 1}, {2, 3});
}
TEST(TwoHosts, DeathOfALeaderEndsTheCallEverywhereAndTheRestFormsAgain) {
  run_on_two_hosts("KilledLeader", {0, 1}, {2, 3});
}
TEST(TwoHosts, DeathInTheMiddleOfACollectiveEndsIt) { run_on_two_hosts("KilledInTheMiddle", {0, 1}, {2, 3}); }
TEST(TwoHosts, DeathBeforeAGroupIsToldOnBothHosts) { run_on_two_hosts("KilledBeforeAGroup", {0, 1}, {2, 3}); }
TEST(TwoHosts, ALateRankIsNamedOnBothHosts) { run_on_two_hosts("LateRank", {0, 1}, {2, 3}); }
TEST(TwoHosts, LinkTakenDownInTheMiddleEndsTheCallByItsDeadline) {
  run_on_two_hosts("LinkDown", {0, 1}, {2, 3});
}
TEST(TwoHosts, WhoLeavesAfterItsPartFailsNobodysLastCallOverASlowCable) {
  run_on_two_hosts("LastCalls", {0, 1}, {2, 3}, 100);
}
TEST(TwoHosts, BackendShmIsRefusedWithTheRanksOfEachHost) {
  run_on_two_hosts("NoSharedMemoryBetweenHosts", {0, 1}, {2, 3});
}
TEST(TwoHosts, WhoDoesNotComeIsNamed) { run_on_two_hosts("OneNeverCame", {0, 1}, {2}); }

}  // namespace
}  // namespace accelmgr::collective::hosts_test
