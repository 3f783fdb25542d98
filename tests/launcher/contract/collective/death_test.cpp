// Checks what happens when a member is killed: the calls of the other members end at once with an error that
// names it, and they can go on without it.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <functional>
#include <numeric>
#include <thread>

#include "base/clock.hpp"
#include "call.hpp"
#include "contract.hpp"
#include "launcher/collective/expect_error.hpp"
#include "world.hpp"

namespace accelmgr::collective::contract {
namespace {

using Cause = CollectiveError::Cause;
using test::expect_error;
using Use = std::function<void(Communicator&)>;

const std::vector<Start> processes{Start::forked, Start::executed};

std::vector<int> first(int count) {
  std::vector<int> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void expect_goes_on(Communicator& communicator, const Rank& self) {
  EXPECT_EQ(perform({.kind = CallKind::all_reduce, .dtype = DType::float32, .count = 1000}, communicator,
                    self.backend.in_rank_order),
            "");
  EXPECT_EQ(communicator.all_gather_objects("here").size(), static_cast<std::size_t>(communicator.size()));
}

void expect_lost(int victim, Communicator& group, const Use& call, Rank& self) {
  const auto what = expect_error(Cause::lost, {victim}, [&] { call(group); });
  const auto told_ns = base::now_ns();
  EXPECT_NE(what.find("rank " + std::to_string(victim)), std::string::npos) << what;
  EXPECT_LT(static_cast<double>(told_ns - self.meeting.died_ns(victim)) * 1e-9, self.backend.death_within_s);
}

std::size_t address_space_bytes() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

std::byte memory[1 << 20];  // One for each rank, because ranks are processes here.

const Use uses[] = {
    [](Communicator& group) { group.barrier(); },
    [](Communicator& group) { group.all_reduce(memory, memory, 1000, DType::float32, ReduceOp::sum); },
    [](Communicator& group) { group.all_reduce(memory, memory, sizeof memory, DType::uint8, ReduceOp::sum); },
    [](Communicator& group) { group.all_gather_objects("object"); },
    [](Communicator& group) { group.broadcast(memory, 1000, DType::uint8, group.size() - 1); },
    [](Communicator& group) { group.broadcast_object("object", 0); },
    [](Communicator& group) { group.reduce_scatter(memory, memory, 1000, DType::int32, ReduceOp::sum); },
    [](Communicator& group) { group.all_gather(memory, memory, 1000, DType::uint8); },
    [](Communicator& group) { group.all_to_all(memory, memory, 1000, DType::uint8); },
    [](Communicator& group) { group.group(first(group.size())); },
};

/// Broadcasts so many bytes that a member can die in the middle.
struct LongBroadcast {
  LongBroadcast(Rank& self, int from)
      : root(from),
        data(std::size_t{64} << 20, self.world.rank() == from),
        group(self.world.group(first(self.world.size()))) {
    self.meeting.meet(self.world.size());
  }
  void repeat() {
    for (;;) group->broadcast(data.data(), data.size(), DType::uint8, root);
  }
  /// For another thread of a rank that is not the root. Waits for the first byte and returns true; returns
  /// false if `ended` is set first.
  /// Not checked by the thread sanitizer, which takes recv() for a write that is not atomic.
  __attribute__((no_sanitize("thread"))) bool has_begun() {
    while (!ended && __atomic_load_n(data.data(), __ATOMIC_RELAXED) == 0) std::this_thread::yield();
    return !ended;
  }

  int root;
  std::vector<std::uint8_t> data;
  std::shared_ptr<Communicator> group;
  std::atomic<bool> ended = false;
};

/// The member of the highest rank dies while the others make a call of `uses`. They go on without it, and the
/// next member dies, until one is left.
void expect_all_go_on_without_the_last(Rank& self, std::size_t (*use_of)(std::size_t death)) {
  auto group = self.world.group(first(self.world.size()));
  for (int size = self.world.size(); size > 1; --size) {
    SCOPED_TRACE(size);
    const int victim = size - 1;
    const auto& use = uses[use_of(static_cast<std::size_t>(self.world.size() - size)) % std::size(uses)];
    self.meeting.meet(size);
    if (self.world.rank() == victim) self.meeting.die(victim);
    expect_lost(victim, *group, use, self);
    group = (victim % 2 == 0 ? self.world : *group).group(first(victim));
    expect_goes_on(*group, self);
  }
}

}  // namespace

CONTRACT(Death, EndsTheCallOnAllOthersAndTheyGoOnWithoutIt, .fewest_ranks = 2, .starts = processes) {
  expect_all_go_on_without_the_last(self, [](std::size_t death) { return death; });
}
// Seven ranks have six deaths: the promise above has the first uses, this one the last.
CONTRACT(Death, EndsEveryKindOfCall, .fewest_ranks = 2, .sizes = {7}, .starts = processes) {
  expect_all_go_on_without_the_last(self, [](std::size_t death) { return std::size(uses) - 1 - death; });
}

// The victim dies when another member has the first byte of its message.
CONTRACT(Death, InTheMiddleOfItsMessageEndsTheCall, .fewest_ranks = 2, .starts = processes) {
  const int victim = self.world.size() - 1;
  LongBroadcast broadcast(self, victim);
  std::jthread watcher([&] {
    if (self.world.rank() == victim) {
      while (self.meeting.counted() == 0) std::this_thread::yield();
      self.meeting.die(victim);
    }
    if (broadcast.has_begun()) self.meeting.count();
  });
  expect_lost(
      victim, *broadcast.group, [&](Communicator&) { broadcast.repeat(); }, self);
  broadcast.ended = true;
}

CONTRACT(Death, InTheMiddleOfAMessageToItEndsTheCall, .fewest_ranks = 2, .starts = processes) {
  const int victim = self.world.size() - 1;
  LongBroadcast broadcast(self, 0);
  std::jthread watcher([&] {
    if (self.world.rank() == victim && broadcast.has_begun()) self.meeting.die(victim);
  });
  expect_lost(
      victim, *broadcast.group, [&](Communicator&) { broadcast.repeat(); }, self);
}

CONTRACT(Death, InTheMiddleOfAnAllReduceEndsTheCall, .fewest_ranks = 2, .starts = processes) {
  const int victim = self.world.size() - 1;
  std::vector<float> data(std::size_t{4} << 20);
  const auto reduce = [&](Communicator& world) {
    world.all_reduce(data.data(), data.data(), data.size(), DType::float32, ReduceOp::sum);
  };
  reduce(self.world);  // From here on all are in the call again at once.
  std::jthread killer([&] {
    if (self.world.rank() == victim) self.meeting.die(victim);
  });
  const Use repeat = [&](Communicator& world) {
    for (;;) reduce(world);
  };
  expect_lost(victim, self.world, repeat, self);
}

CONTRACT(Death, WhileAGroupIsMadeIsTold, .fewest_ranks = 2, .starts = processes) {
  const int size = self.world.size();
  const int victim = size - 1;
  self.meeting.meet(size);
  if (self.world.rank() == victim) self.meeting.die(victim);
  expect_lost(
      victim, self.world, [&](Communicator& world) { world.group(first(size)); }, self);
  // A group that does not form does not break its parent.
  expect_error(Cause::lost, {victim}, [&] { self.world.barrier(); });
  expect_goes_on(*self.world.group(first(victim)), self);
}

// The child is a worker of a data loader, for instance. What it inherited must not make the dead member look
// alive.
CONTRACT(Death, IsSeenWhileAForkedChildLivesOn, .fewest_ranks = 2, .starts = processes) {
  const int victim = self.world.size() - 1;
  self.world.barrier();
  if (self.world.rank() == victim) {
    const auto others = static_cast<std::uint64_t>(victim);
    if (fork() == 0) {
      alarm(60);
      while (self.meeting.counted() < others) std::this_thread::yield();
      _exit(0);
    }
    self.meeting.die(victim);
  }
  expect_lost(victim, self.world, uses[0], self);
  self.meeting.count();
}

// Rank 0 lives, but has no memory for the object of the last rank.
CONTRACT(Failure, OfOneInTheMiddleOfACallIsToldToAll, .fewest_ranks = 2, .starts = processes) {
  if (sanitized)
    GTEST_SKIP() << "under RLIMIT_AS a sanitizer cannot map its own memory, and ends the process";
  const std::string object(self.world.rank() == self.world.size() - 1 ? std::size_t{64} << 20 : 1, 'x');
  self.world.barrier();
  if (self.world.rank() != 0) {
    const auto begin = base::now_ns();
    expect_error(Cause::lost, {0}, [&] { self.world.all_gather_objects(object); });
    EXPECT_LT(static_cast<double>(base::now_ns() - begin) * 1e-9, world_timeout_s / 2);
    return;
  }
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  const rlimit little{address_space_bytes() + (std::size_t{16} << 20), before.rlim_max};
  setrlimit(RLIMIT_AS, &little);
  EXPECT_THROW(self.world.all_gather_objects(object), std::bad_alloc);
  setrlimit(RLIMIT_AS, &before);
  EXPECT_THROW(self.world.barrier(), CollectiveError);
}

CONTRACT(Death, OfAnyRankBreaksWhatItWasIn, .fewest_ranks = 3, .starts = processes) {
  auto group = self.world.group(first(self.world.size()));
  std::vector<int> left = first(self.world.size());
  for (const int victim : {0, 2}) {
    SCOPED_TRACE(victim);
    const auto at = std::ranges::find(left, victim) - left.begin();
    self.meeting.meet(static_cast<int>(left.size()));
    if (self.world.rank() == victim) self.meeting.die(victim);
    expect_lost(victim, *group, uses[0], self);
    expect_error(Cause::broken, {victim}, [&] { group->barrier(); });
    left.erase(left.begin() + at);
    auto of_group = first(group->size());
    of_group.erase(of_group.begin() + at);
    group = group->group(of_group);
    EXPECT_EQ(group->ranks(), left);
    expect_goes_on(*group, self);
  }
}

CONTRACT(Death, IsToldToAllEvenIfOneComesMuchLater, .fewest_ranks = 3, .starts = processes) {
  const int size = self.world.size();
  const int victim = size - 1;
  self.meeting.meet(size);
  if (self.world.rank() == victim) self.meeting.die(victim);
  if (self.world.rank() > 0) expect_lost(victim, self.world, uses[1], self);
  self.meeting.meet(size - 1);
  if (self.world.rank() > 0) return;
  try {
    uses[1](self.world);
    ADD_FAILURE() << "no error";
  } catch (const CollectiveError& error) {
    EXPECT_TRUE(error.cause() == Cause::lost || error.cause() == Cause::broken) << error.what();
    EXPECT_EQ(error.ranks(), std::vector<int>{victim}) << error.what();
  }
}

CONTRACT(Death, OutsideAGroupDoesNotDisturbIt, .fewest_ranks = 3, .starts = processes) {
  const int size = self.world.size();
  const int victim = size - 1;
  const auto group = self.world.rank() == victim ? nullptr : self.world.group(first(victim));
  self.meeting.meet(size);
  if (self.world.rank() == victim) self.meeting.die(victim);
  for (int round = 0; round < 20; ++round) expect_goes_on(*group, self);
  expect_goes_on(*self.world.group(first(victim)), self);
}

}  // namespace accelmgr::collective::contract
