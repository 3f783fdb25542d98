// Tests of groups: communicators of some members, used at the same time and by several threads.
// sequences_test.cpp makes random groups of any communicator and uses them in turn.
#include <algorithm>
#include <numeric>
#include <thread>

#include "base/clock.hpp"
#include "base/ipc/processes.hpp"
#include "call.hpp"
#include "contract.hpp"
#include "launcher/collective/expect_error.hpp"
#include "message_of.hpp"
#include "refusal.hpp"

namespace accelmgr::collective::contract {
namespace {

using Ranks = std::vector<int>;

void expect_works(Communicator& group, Rank& self, int rounds = 3) {
  for (int round = 0; round < rounds; ++round) {
    const auto seed = static_cast<std::uint64_t>(round);
    const Call calls[] = {
        {.kind = CallKind::all_reduce, .dtype = DType::float32, .count = 1000, .seed = seed},
        {.kind = CallKind::reduce_scatter, .dtype = DType::int32, .count = 10, .seed = seed},
        {.kind = CallKind::all_gather, .dtype = DType::uint8, .count = 33, .seed = seed},
        {.kind = CallKind::all_to_all, .dtype = DType::int64, .count = 5, .seed = seed},
        {.kind = CallKind::broadcast,
         .dtype = DType::float64,
         .count = 7,
         .root = group.size() - 1,
         .seed = seed}};
    for (const auto& call : calls) EXPECT_EQ(perform(call, group, self.backend.in_rank_order), "");
    // The group has the right members, by their ranks in the world.
    const auto names = group.all_gather_objects(std::to_string(self.world.rank()));
    ASSERT_EQ(names.size(), group.ranks().size());
    for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(names[i], std::to_string(group.ranks()[i]));
  }
}

}  // namespace

// The first attempt of the late member ends at once. Its second one meets the second one of the other
// members.
CONTRACT(Group, IsMadeAtASecondTryAfterOneMemberWasLate, .sizes = {2, 4}, .starts = {Start::threads}) {
  const int late = self.world.size() - 1;
  const auto attempt = [&](double timeout_s) {
    const auto what = test::expect_error(CollectiveError::Cause::timeout, {late}, [&] {
      self.world.group(all_of(self.world), {.timeout_s = timeout_s});
    });
    EXPECT_NE(what.find(std::to_string(late)), std::string::npos) << what;
  };
  self.meeting.meet(self.world.size());
  if (self.world.rank() == late) {
    while (self.meeting.counted() < static_cast<std::uint64_t>(late)) std::this_thread::yield();
    const auto begin = base::now_ns();
    attempt(60);
    EXPECT_LT(static_cast<double>(base::now_ns() - begin) * 1e-9, 30);
  } else {
    attempt(2);  // Those that try must all arrive within this.
    self.meeting.count();
  }
  expect_works(*self.world.group(all_of(self.world)), self);
}

// A child that returns from main(), or a data loader's worker, destroys its copy like that.
CONTRACT(Group, WhoseCopyAForkedChildDestroysWorksOn, .fewest_ranks = 2,
         .starts = {Start::forked, Start::executed}) {
  auto group = self.world.group(all_of(self.world));
  const auto child = ipc::test::fork_child([&] {
    const auto expect_refused = [](const auto& call) {
      EXPECT_TRUE(test::says(test::message_of<UsageError>(call),
                             {"this communicator belongs to the process that forked this one"}));
    };
    expect_refused([&] { group->barrier(); });
    expect_refused([&] { group->group(Ranks{0}); });
    group.reset();
    return testing::Test::HasFailure() ? 1 : 0;
  });
  EXPECT_EQ(ipc::test::end_of(child), "exit code 0");
  expect_works(*group, self);
}

CONTRACT(Group, OutlivesTheCommunicatorItWasMadeFrom, .fewest_ranks = 2) {
  auto parent = self.world.group(all_of(self.world));
  const auto group = parent->group(all_of(*parent));
  parent.reset();
  expect_works(*group, self);
}

CONTRACT(Groups, ThatAreDisjointWorkAtTheSameTime, .fewest_ranks = 2) {
  // The lower half calls five times as often: neither waits for the other.
  const int half = self.world.size() / 2;
  Ranks lower(static_cast<std::size_t>(half)), upper(static_cast<std::size_t>(self.world.size() - half));
  std::iota(lower.begin(), lower.end(), 0);
  std::iota(upper.begin(), upper.end(), half);
  const bool is_lower = self.world.rank() < half;
  const auto group = self.world.group(is_lower ? lower : upper);
  expect_works(*group, self, is_lower ? 10 : 2);
  self.world.barrier();
}

CONTRACT(Groups, AreUsedByTwoThreadsOfAMemberAtTheSameTime, .fewest_ranks = 2) {
  const auto other = self.world.group(all_of(self.world));
  const Call call{.kind = CallKind::all_reduce, .dtype = DType::int32, .count = sanitized ? 5000 : 20000};
  std::string wrong;
  {
    // GoogleTest's failures are collected per thread.
    const std::jthread thread([&] {
      for (int round = 0; round < 20 && wrong.empty(); ++round) try {
          wrong = perform(call, *other);
        } catch (const std::exception& error) {
          wrong = error.what();
        }
    });
    for (int round = 0; round < 20; ++round) EXPECT_EQ(perform(call, self.world), "");
  }
  EXPECT_EQ(wrong, "");
}

CONTRACT(Group, OfAListThatIsWrongIsRefusedAndNothingIsSent) {
  const int size = self.world.size();
  const int rank = self.world.rank();
  const int other = (rank + 1) % size;
  const auto refusal = [&](const Ranks& ranks) {
    return test::message_of<UsageError>([&] { self.world.group(ranks); });
  };
  EXPECT_NE(refusal({}), "");
  EXPECT_NE(refusal({rank, rank}), "") << "doubled";
  EXPECT_NE(refusal({-1, rank}).find("-1"), std::string::npos) << "below the range";
  EXPECT_NE(refusal({rank, size}).find(std::to_string(size)), std::string::npos) << "beyond the range";
  if (size > 1) {
    EXPECT_NE(refusal({std::max(rank, other), std::min(rank, other)}), "") << "not ascending";
    EXPECT_NE(refusal({other}).find(std::to_string(rank)), std::string::npos) << "without the caller";
  }
  expect_works(self.world, self, 1);
  expect_works(*self.world.group(all_of(self.world)), self, 1);
}

}  // namespace accelmgr::collective::contract
