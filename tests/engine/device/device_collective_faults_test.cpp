// Collectives of devices whose ranks do not come, die, leave, disagree or meet errors.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/cuda/device_collectives.hpp"
#include "message_of.hpp"
#include "refusal.hpp"
#include "team.hpp"

namespace accelmgr::test {
namespace {

using device::DeviceError;
using First = FakeNccl::FirstOperation;
namespace nccl_code = device::nccl_code;

/// Queues a sum of one number.
bool queue_sum(Team::Rank& rank) {
  return rank.collectives.all_reduce(rank.memory.get(), rank.memory.get(), 1, DType::float32, ReduceOp::sum,
                                     rank.stream().get());
}

void expect_aborted(Team::Rank& rank) {
  EXPECT_TRUE(rank.collectives.aborted());
  expect_contains(message_of<DeviceError>([&] { static_cast<void>(queue_sum(rank)); }),
                  {"the communicator of the team was aborted"});
  EXPECT_THROW(static_cast<void>(rank.wait(rank.stream())), DeviceError);
  EXPECT_FALSE(rank.device.given_up());
}

TEST(DeviceCollectives, DoNotWaitForEverForARankThatDoesNotCome) {
  for (const bool has_own_deadline : {false, true}) {
    Team team({.timeout_s = has_own_deadline ? 30 : 0.5});
    auto& rank = team.make(0);
    team.make(1);
    const auto connect = [&] {
      return has_own_deadline ? rank.collectives.connect(0.5) : rank.collectives.connect();
    };
    expect_contains(
        message_of<DeviceError>([&] { static_cast<void>(connect()); }),
        {"ncclCommInitRankConfig: the team of 3 devices hangs: not all ranks have done their part "
         "within 0.5 s; this is rank 0"});
    EXPECT_GE(rank.sink.asked, 1) << "signs of life";
    EXPECT_TRUE(rank.collectives.aborted());
    team.ranks.erase(team.ranks.begin() + 2);
    expect_clean(team, 2);
  }
}

TEST(DeviceCollectives, DoNotWaitForEverForARankThatDoesNotQueue) {
  ConnectedTeam team({.size = 2, .timeout_s = 0.1});
  auto& rank = team[0];
  ASSERT_TRUE(queue_sum(rank));
  EXPECT_THROW(static_cast<void>(rank.wait(rank.stream())), DeviceError);
  expect_aborted(rank);
  rank.device.settle(rank.stream().get());
  EXPECT_FALSE(rank.device.given_up()) << "the abort has ended the operation on its stream";
  expect_clean(team, 1);
}

// The first operation connects the ranks, and does not get to its stream before all have come.
TEST(DeviceCollectives, DoNotWaitForEverToQueue) {
  ConnectedTeam team({.size = 2, .first = First::when_asked, .timeout_s = 0.1});
  expect_contains(message_of<DeviceError>([&] { static_cast<void>(queue_sum(team[0])); }),
                  {"ncclAllReduce: the team of 2 devices hangs"});
  expect_aborted(team[0]);
  expect_clean(team, 1);
}

TEST(DeviceCollectives, EndWhenTheResultIsNotWanted) {
  {
    Team team({.size = 2});
    auto& rank = team.make(0);
    rank.sink.wants = false;
    EXPECT_FALSE(rank.collectives.connect());
    expect_aborted(rank);
    team.ranks.pop_back();
    expect_clean(team, 1);
  }
  for (const bool queueing : {true, false}) {
    ConnectedTeam team({.size = 2, .first = queueing ? First::when_asked : First::soon});
    auto& rank = team[0];
    if (queueing) {
      rank.sink.wants = false;
      EXPECT_FALSE(queue_sum(rank));
    } else {
      ASSERT_TRUE(queue_sum(rank));
      rank.sink.wants = false;
      EXPECT_FALSE(rank.wait(rank.stream()));
    }
    expect_aborted(rank);
    expect_clean(team, 1);
  }
}

TEST(DeviceCollectives, EndWhenAnotherThreadAborts) {
  ConnectedTeam team({.size = 2});
  auto& rank = team[0];
  ASSERT_TRUE(queue_sum(rank));
  std::thread other([&] {
    while (rank.sink.asked == 0) std::this_thread::yield();  // It waits now.
    rank.collectives.abort();
  });
  EXPECT_THROW(static_cast<void>(rank.wait(rank.stream())), DeviceError);
  other.join();
  expect_aborted(rank);
  expect_clean(team, 1);
}

TEST(DeviceCollectives, TellOfTheDeathOfAPeerThatNobodyElseTellsOf) {
  ConnectedTeam team({.size = 2, .timeout_s = 1});
  team.nccl.tell_of_aborts();
  ASSERT_TRUE(queue_sum(team[0]));
  team[1].collectives.abort();
  try {
    static_cast<void>(team[0].wait(team[0].stream()));
    ADD_FAILURE() << "it ended";
  } catch (const DeviceError& error) {
    EXPECT_EQ(error.function(), "ncclCommGetAsyncError");
    EXPECT_EQ(error.code(), nccl_code::remote_error);
    EXPECT_STREQ(
        error.what(),
        "ncclCommGetAsyncError: remote process exited or there was a network error (6): what the fake "
        "knows");
  }
  expect_aborted(team[0]);
  expect_clean(team, 2);
}

// Otherwise one death would end all runners of the team.
TEST(DeviceCollectives, LeaveTheDeathOfAPeerToTheSession) {
  for (const bool queueing : {true, false}) {
    ConnectedTeam team({.size = 2});
    team.nccl.tell_of_aborts();
    if (!queueing) {
      ASSERT_TRUE(queue_sum(team[0]));
    }
    team[1].collectives.abort();
    std::thread session([&] {
      while (team[0].sink.asked < 3) std::this_thread::yield();
      team[0].sink.wants = false;
    });
    EXPECT_FALSE(queueing ? queue_sum(team[0]) : team[0].wait(team[0].stream()));
    session.join();
    expect_aborted(team[0]);
    expect_clean(team, 2);
  }
}

TEST(DeviceCollectives, KeepWhatEndedThemUnlessItWasTheDeviceOrNobodyWantsThem) {
  const auto failure_of = [](const std::function<void(Team&)>& disturb, double timeout_s = 30) {
    ConnectedTeam team({.size = 2, .timeout_s = timeout_s});
    EXPECT_EQ(team[0].collectives.failure(), "");
    disturb(team);
    try {
      if (queue_sum(team[0])) static_cast<void>(team[0].wait(team[0].stream()));
    } catch (const DeviceError& error) {
      const auto& kept = team[0].collectives.failure();
      EXPECT_TRUE(kept.empty() || kept == error.what()) << kept;
    }
    EXPECT_TRUE(team[0].collectives.aborted());
    return team[0].collectives.failure();
  };
  EXPECT_NE(failure_of([](Team&) {}, 0.1).find("the team of 2 devices hangs"), std::string::npos);
  const auto reports = [](device::NcclCode code) {
    return [code](Team& team) { team.nccl.fail("ncclAllReduce", 1, code); };
  };
  EXPECT_NE(failure_of(reports(nccl_code::internal_error)).find("ncclAllReduce"), std::string::npos);
  EXPECT_EQ(failure_of(reports(nccl_code::unhandled_cuda_error)), "");
  EXPECT_EQ(failure_of([](Team& team) { team[0].sink.wants = false; }), "");
  EXPECT_EQ(failure_of([&](Team& team) {
              reports(nccl_code::remote_error)(team);
              team[0].sink.wants = false;
            }),
            "");
}

TEST(DeviceCollectives, AreAbortedByAnAsynchronousErrorAfterTheirEventToo) {
  ConnectedTeam team({.size = 1});
  team[0].device.record(team[0].event, team[0].stream().get());
  while (!team[0].device.happened(team[0].event)) std::this_thread::yield();
  team.nccl.fail_asynchronously(0, nccl_code::system_error);
  EXPECT_THROW(static_cast<void>(team[0].collectives.wait(team[0].event)), DeviceError);
  expect_aborted(team[0]);
  expect_clean(team, 1);
}

TEST(DeviceCollectives, EveryCallThatFailsThrowsAndAborts) {
  const auto use_all = [](Team::Rank& rank) {
    auto& team = rank.collectives;
    auto* at = rank.memory.get();
    auto* stream = rank.stream().get();
    return team.connect() && team.all_reduce(at, at, 1, DType::float32, ReduceOp::sum, stream) &&
           team.reduce_scatter(at, at, 1, DType::float32, ReduceOp::sum, stream) &&
           team.all_gather(at, at, 1, stream) && team.broadcast(at, 1, 0, stream) &&
           team.all_to_all(at, at + 4, 1, stream);
  };
  for (const char* function : {"ncclCommGetAsyncError", "ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                               "ncclBroadcast", "ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"}) {
    Team team({.size = 1});
    team.make_all();
    team.nccl.fail(function, 1, nccl_code::system_error);
    try {
      use_all(team[0]);
      ADD_FAILURE() << function;
    } catch (const DeviceError& error) {
      EXPECT_EQ(error.code(), nccl_code::system_error) << function;
      expect_contains(error.what(), {"unhandled system error (2): what the fake knows"});
      if (std::string(function) != "ncclGroupStart" && std::string(function) != "ncclSend" &&
          std::string(function) != "ncclRecv") {
        EXPECT_EQ(error.function(), function);
      }
    }
    expect_aborted(team[0]);
    expect_clean(team, 1);
  }
}

// NCCL would not notice; the fake does.
TEST(DeviceCollectives, OfRanksThatDisagreeAreNoticedByTheFake) {
  ConnectedTeam team({.size = 2});
  const auto gather = [&](int rank, std::size_t bytes) {
    auto* memory = team[rank].memory.get();
    return team[rank].collectives.all_gather(memory, memory, bytes, team[rank].stream().get());
  };
  ASSERT_TRUE(gather(0, 4));
  EXPECT_THROW(static_cast<void>(gather(1, 2)), DeviceError);
  EXPECT_THROW(static_cast<void>(team[0].wait(team[0].stream())), DeviceError);
  EXPECT_EQ(team.nccl.mismatches(), std::vector<std::string>{"ncclAllGather of rank 1"});
}

TEST(DeviceCollectives, ThatCannotBeMadeLeaveNothing) {
  Team team({.size = 1});
  team.nccl.fail("ncclCommInitRankConfig", 1, nccl_code::internal_error);
  EXPECT_THROW(team.make_all(), DeviceError);
  team.nccl.fail("ncclGetUniqueId", 1, nccl_code::system_error);
  EXPECT_THROW(device::DeviceCollectives::make_id(FakeNccl::table()), DeviceError);
  team.ranks.clear();
  expect_clean(team, 0);
}

TEST(DeviceCollectives, RefuseWhatADeviceCannotReduce) {
  Team team({.size = 1});
  team.make_all();
  const auto reduce = [&](DType dtype, ReduceOp operation) {
    return team[0].collectives.all_reduce(team[0].memory.get(), team[0].memory.get(), 1, dtype, operation,
                                          team[0].stream().get());
  };
  EXPECT_THROW(static_cast<void>(reduce(DType::float32, ReduceOp::sum)), UsageError)
      << "before it is connected";
  ASSERT_TRUE(team.connect());
  for (const auto dtype : {DType::int16, DType::boolean, DType::complex64})
    EXPECT_THROW(static_cast<void>(reduce(dtype, ReduceOp::sum)), UsageError) << name_of(dtype);
  for (const auto operation : {ReduceOp::bit_and, ReduceOp::bit_or})
    EXPECT_THROW(static_cast<void>(reduce(DType::int32, operation)), UsageError);
  EXPECT_THROW(static_cast<void>(reduce(DType::int64, ReduceOp::avg)), UsageError);
  EXPECT_TRUE(reduce(DType::float32, ReduceOp::sum)) << "the team goes on";
  EXPECT_TRUE(team[0].wait(team[0].stream()));
  EXPECT_THROW(device::DeviceCollectives(team[0].device, FakeNccl::table(), team.id, 1, 1, team[0].sink, 1),
               UsageError);
  expect_clean(team, 0);
}

// A driver that hangs may keep abort for ever.
TEST(DeviceCollectives, DoNotWaitForEverForAnAbort) {
  ConnectedTeam team({.size = 2});
  team.nccl.hang("ncclCommAbort");
  const auto begin = base::now_ns();
  team[0].collectives.abort();
  team[0].collectives.abort();
  EXPECT_LT(base::now_ns() - begin, std::int64_t(2e9 * timing::team_aborts_s));
  EXPECT_EQ(team[0].sink.told,
            "ncclCommAbort has not returned within 5 s: NCCL may go on to write to memory of this process");
  EXPECT_EQ(team.nccl.calls("ncclCommAbort"), 1);
  expect_aborted(team[0]);
}

TEST(DeviceCollectives, DoNotWaitForEverForACallThatAnAbortWouldInterrupt) {
  ConnectedTeam team({.size = 2});
  team.nccl.hang("ncclAllReduce");
  std::thread caller([&] { EXPECT_THROW(static_cast<void>(queue_sum(team[0])), DeviceError); });
  while (team.nccl.calls("ncclAllReduce") == 0) std::this_thread::yield();
  team[0].collectives.abort();
  EXPECT_NE(team[0].sink.told.find("a call of NCCL has not returned within 5 s"), std::string::npos)
      << team[0].sink.told;
  team.nccl.release();
  caller.join();
}

TEST(DeviceCollectives, OfADeviceThatWasGivenUpMakeNoCall) {
  ConnectedTeam team({.size = 1});
  const auto before = team.nccl.calls("ncclCommFinalize") + team.nccl.calls("ncclCommAbort");
  team[0].device.give_up();
  team.ranks.clear();
  EXPECT_EQ(team.nccl.calls("ncclCommFinalize") + team.nccl.calls("ncclCommAbort"), before);
}

}  // namespace
}  // namespace accelmgr::test
