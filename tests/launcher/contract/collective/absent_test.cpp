// Checks what happens when a member lives but does not make a call: the other members wait until their
// deadline and no longer, and their error names the member. The code that judges the deadline is the same
// however ranks are started, so they are threads.
#include <algorithm>
#include <functional>
#include <numeric>

#include "base/clock.hpp"
#include "call.hpp"
#include "contract.hpp"
#include "launcher/collective/expect_error.hpp"

namespace accelmgr::collective::contract {
namespace {

using Cause = CollectiveError::Cause;
using test::expect_error;

// For a member that waits alone.
constexpr CallOptions hurried{.timeout_s = 0.3};
// For calls that all present members make at the same time. A present member that gets no processor for so
// long would be named as missing, too: these tests have the label `timing` and run alone.
constexpr CallOptions together{.timeout_s = 0.8};
constexpr double late_s = 30;
constexpr std::size_t most_bytes = sanitized ? 1 << 19 : 2 << 20;

std::shared_ptr<Communicator> group_of_all(Rank& self) {
  auto group = self.world.group(all_of(self.world));
  self.meeting.meet(self.world.size());
  return group;
}

double seconds_of(const std::function<void()>& call) {
  const auto begin = base::now_ns();
  call();
  return static_cast<double>(base::now_ns() - begin) * 1e-9;
}

void expect_timeout(const std::vector<int>& missing, const std::function<void()>& call) {
  const auto seconds = seconds_of([&] {
    const auto what = expect_error(Cause::timeout, missing, call);
    for (const int rank : missing) EXPECT_NE(what.find(std::to_string(rank)), std::string::npos) << what;
  });
  EXPECT_LT(seconds, together.timeout_s + late_s);
}

/// For a member that waits alone: it must wait for all of its timeout. Members that wait together all end
/// when the first of them gives up.
void expect_timeout_of_one(const std::vector<int>& missing, const std::function<void()>& call) {
  const auto seconds = seconds_of([&] { expect_timeout(missing, call); });
  EXPECT_GE(seconds, hurried.timeout_s * 0.99);
}

void expect_broken(const std::vector<int>& missing, Communicator& communicator) {
  const auto seconds = seconds_of([&] {
    expect_error(Cause::broken, missing, [&] { communicator.barrier(); });
    expect_error(Cause::broken, missing, [&] { communicator.all_gather_objects("x"); });
  });
  EXPECT_LT(seconds, late_s);
}

/// For a member that calls after the others have given up: its call must fail soon.
void expect_told(const std::function<void()>& call) {
  const auto seconds = seconds_of([&] {
    try {
      call();
      ADD_FAILURE() << "no error";
    } catch (const CollectiveError& error) {
      EXPECT_NE(error.cause(), Cause::mismatch) << error.what();
    }
  });
  EXPECT_LT(seconds, together.timeout_s + late_s);
}

void expect_works(Communicator& communicator) {
  EXPECT_EQ(perform({.kind = CallKind::all_reduce, .dtype = DType::int32, .count = 1000}, communicator), "");
}

struct Kind {
  const char* name;
  std::function<void(Communicator&, std::byte* memory)> call;
};

const Kind kinds[] = {
    {"all_reduce",
     [](Communicator& group, std::byte* memory) {
       group.all_reduce(memory, memory, 9, DType::uint8, ReduceOp::sum, together);
     }},
    {"all_reduce of many chunks",
     [](Communicator& group, std::byte* memory) {
       group.all_reduce(memory, memory, most_bytes, DType::uint8, ReduceOp::sum, together);
     }},
    {"reduce_scatter",
     [](Communicator& group, std::byte* memory) {
       group.reduce_scatter(memory, memory, 9, DType::uint8, ReduceOp::sum, together);
     }},
    {"all_gather", [](Communicator& group,
                      std::byte* memory) { group.all_gather(memory, memory, 9, DType::uint8, together); }},
    {"broadcast",
     [](Communicator& group, std::byte* memory) { group.broadcast(memory, 9, DType::uint8, 0, together); }},
    {"all_to_all", [](Communicator& group,
                      std::byte* memory) { group.all_to_all(memory, memory, 9, DType::uint8, together); }},
    {"barrier", [](Communicator& group, std::byte*) { group.barrier(together); }},
    {"all_gather_objects",
     [](Communicator& group, std::byte*) { group.all_gather_objects("object", together); }},
    {"broadcast_object",
     [](Communicator& group, std::byte*) { group.broadcast_object("object", 0, together); }},
};

}  // namespace

CONTRACT(Absent, EndsEveryKindOfCallAtItsDeadline, .sizes = {3}, .starts = {Start::threads}) {
  const int absent = self.world.size() - 1;
  for (const auto& kind : kinds) {
    SCOPED_TRACE(kind.name);
    std::vector<std::byte> memory(most_bytes, std::byte{6});
    const auto group = group_of_all(self);
    if (self.world.rank() != absent) {
      expect_timeout({absent}, [&] { kind.call(*group, memory.data()); });
      EXPECT_EQ(std::count(memory.begin(), memory.end(), std::byte{6}),
                static_cast<std::ptrdiff_t>(most_bytes));
    }
    self.meeting.meet(self.world.size());
  }
}

CONTRACT(Absent, BreaksTheCommunicatorAndNoOther, .sizes = {2, 4}, .starts = {Start::threads}) {
  const int absent = self.world.size() - 1;
  const auto group = group_of_all(self);
  if (self.world.rank() != absent) {
    expect_timeout({absent}, [&] { group->barrier(together); });
    expect_broken({absent}, *group);
  }
  self.meeting.meet(self.world.size());
  expect_works(self.world);
  // The broken communicator still makes a group of all, with the member that was missing.
  expect_works(*group->group(all_of(*group)));
}

CONTRACT(Absent, AreAllNamed, .fewest_ranks = 3, .starts = {Start::threads}) {
  const auto group = group_of_all(self);
  std::vector<int> absent = all_of(self.world);
  absent.erase(absent.begin());
  if (self.world.rank() == 0)
    expect_timeout_of_one(absent, [&] { group->all_gather_objects("here", hurried); });
  self.meeting.meet(self.world.size());
}

CONTRACT(Absent, ThatComesLateIsToldToo, .sizes = {2, 4}, .starts = {Start::threads}) {
  const int late = self.world.size() - 1;
  const auto group = group_of_all(self);
  if (self.world.rank() != late) expect_timeout({late}, [&] { group->barrier(together); });
  self.meeting.meet(self.world.size());
  if (self.world.rank() == late) expect_told([&] { group->barrier(together); });
  expect_works(self.world);
}

CONTRACT(Absent, InAGroupIsNamedByItsRankInTheWorld, .sizes = {3, 7}, .starts = {Start::threads}) {
  const int last = self.world.size() - 1;
  std::shared_ptr<Communicator> group;  // Kept until the end: a member that has left is not late.
  if (self.world.rank() >= last - 1) {
    group = self.world.group(std::vector<int>{last - 1, last});
    if (self.world.rank() == last - 1) expect_timeout_of_one({last}, [&] { group->barrier(hurried); });
  }
  self.meeting.meet(self.world.size());
}

}  // namespace accelmgr::collective::contract
