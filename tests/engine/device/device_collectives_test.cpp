#include "base/cuda/device_collectives.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"
#include "team.hpp"

namespace accelmgr::test {
namespace {

using device::DeviceError;
using First = FakeNccl::FirstOperation;
using Strings = std::vector<std::string>;
namespace nccl_code = device::nccl_code;

/// One call of all ranks. Values are small whole numbers: their sums are the same in any order.
struct Plan {
  enum Kind { all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, kinds };
  Kind kind;
  std::size_t count;
  ReduceOp operation;
  DType dtype;
  int root;
  bool in_place;
  std::size_t stream;

  static Plan random(std::mt19937_64& random, int size) {
    constexpr ReduceOp operations[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::product, ReduceOp::min,
                                       ReduceOp::max};
    const bool whole = random() % 3 == 0;
    auto operation = operations[random() % 5];
    if (whole && operation == ReduceOp::avg) operation = ReduceOp::sum;
    return {.kind = static_cast<Kind>(random() % kinds),
            .count = random() % 50,
            .operation = operation,
            .dtype = whole ? DType::int32 : DType::float32,
            .root = static_cast<int>(random() % static_cast<std::uint64_t>(size)),
            .in_place = random() % 2 == 0,
            .stream = random() % 2};
  }
  std::size_t blocks_from(std::size_t size) const {
    return kind == reduce_scatter || kind == all_to_all ? size : 1;
  }
  std::size_t blocks_to(std::size_t size) const {
    return kind == all_gather || kind == all_to_all ? size : 1;
  }
};

double value(int rank, std::size_t element, std::uint64_t number) {
  return double((std::uint64_t(rank) * 7 + element * 3 + number) % 5 + 1);
}

/// Element `i` of what `rank` gets.
double expected(const Plan& plan, int size, int rank, std::size_t i, std::uint64_t number) {
  const auto n = static_cast<std::size_t>(size), block = plan.count == 0 ? 0 : i / plan.count;
  switch (plan.kind) {
    case Plan::all_gather:
      return value(int(block), i % plan.count, number);
    case Plan::broadcast:
      return value(plan.root, i, number);
    case Plan::all_to_all:
      return value(int(block), std::size_t(rank) * plan.count + i % plan.count, number);
    default:
      break;
  }
  const auto at = plan.kind == Plan::reduce_scatter ? std::size_t(rank) * plan.count + i : i;
  auto result = value(0, at, number);
  for (int other = 1; other < size; ++other) {
    const auto next = value(other, at, number);
    if (plan.operation == ReduceOp::product)
      result *= next;
    else if (plan.operation == ReduceOp::min)
      result = std::min(result, next);
    else if (plan.operation == ReduceOp::max)
      result = std::max(result, next);
    else
      result += next;
  }
  return plan.operation == ReduceOp::avg ? double(float(result) / float(n)) : result;
}

/// What one rank does for a plan: fills memory with a kernel, makes the call, and reads the result later.
class Deed {
 public:
  Deed(Team& team, Team::Rank& rank, const Plan& plan, std::uint64_t number)
      : rank_(rank), plan_(plan), number_(number), size_(static_cast<std::size_t>(team.size())) {
    const auto from_count = plan.count * plan.blocks_from(size_),
               to_count = plan.count * plan.blocks_to(size_);
    const bool in_place = plan.kind == Plan::broadcast || (plan.in_place && plan.kind != Plan::all_to_all);
    from_ = rank.device.allocate(4 * from_count + 1);
    auto* from = from_.get();
    auto* to = from;
    const auto own = std::size_t(rank.collectives.rank()) * plan.count * 4;
    if (!in_place) {
      to_ = rank.device.allocate(4 * to_count + 1);
      to = to_.get();
    } else if (plan.kind == Plan::reduce_scatter) {
      to = from + own;
    } else if (plan.kind == Plan::all_gather) {
      to_ = rank.device.allocate(4 * to_count + 1);
      to = to_.get();
      from = to + own;
    }
    result_ = to;
    team.cuda.launch(stream(), [this, from, from_count] {
      for (std::size_t i = 0; i < from_count; ++i)
        store(from, i, value(rank_.collectives.rank(), i, number_));
    });
    queued_ = queue(from, to);
  }

  void check() const {
    EXPECT_TRUE(queued_);
    for (std::size_t i = 0; i < plan_.count * plan_.blocks_to(size_); ++i)
      ASSERT_EQ(load(i), expected(plan_, int(size_), rank_.collectives.rank(), i, number_))
          << "call " << number_ << ", kind " << plan_.kind << ", rank " << rank_.collectives.rank()
          << ", element " << i;
  }

 private:
  device::StreamHandle stream() const { return rank_.streams[plan_.stream].get(); }
  void store(std::byte* to, std::size_t i, double value) const {
    const auto whole = static_cast<std::int32_t>(value);
    const auto real = static_cast<float>(value);
    plan_.dtype == DType::int32 ? std::memcpy(to + 4 * i, &whole, 4) : std::memcpy(to + 4 * i, &real, 4);
  }
  double load(std::size_t i) const {
    std::int32_t whole = 0;
    float real = 0;
    std::memcpy(&whole, result_ + 4 * i, 4);
    std::memcpy(&real, result_ + 4 * i, 4);
    const bool is_whole = plan_.dtype == DType::int32;
    return is_whole ? whole : real;
  }
  bool queue(const std::byte* from, std::byte* to) {
    auto& team = rank_.collectives;
    switch (plan_.kind) {
      case Plan::all_reduce:
        return team.all_reduce(from, to, plan_.count, plan_.dtype, plan_.operation, stream());
      case Plan::reduce_scatter:
        return team.reduce_scatter(from, to, plan_.count, plan_.dtype, plan_.operation, stream());
      case Plan::all_gather:
        return team.all_gather(from, to, plan_.count * 4, stream());
      case Plan::broadcast:
        return team.broadcast(to, plan_.count * 4, plan_.root, stream());
      default:
        return team.all_to_all(from, to, plan_.count * 4, stream());
    }
  }

  Team::Rank& rank_;
  Plan plan_;
  std::uint64_t number_;
  std::size_t size_;
  device::Memory from_, to_;
  const std::byte* result_ = nullptr;
  bool queued_ = false;
};

void expect_clean(Team& team, int aborts) {
  team.ranks.clear();
  EXPECT_EQ(team.nccl.live(), 0);
  EXPECT_EQ(team.nccl.misuses(), Strings{});
  EXPECT_EQ(team.nccl.mismatches(), Strings{});
  EXPECT_EQ(team.nccl.calls("ncclCommAbort"), aborts);
}

// The thin line: two ranks, one sum.
TEST(DeviceCollectives, SumOverTheRanks) {
  Team team({.size = 2});
  team.run([](Team::Rank& rank) {
    ASSERT_TRUE(rank.collectives.connect());
    const auto memory = rank.device.allocate(sizeof(float));
    auto* number = reinterpret_cast<float*>(memory.get());
    *number = float(rank.collectives.rank() + 1);
    ASSERT_TRUE(rank.collectives.all_reduce(memory.get(), memory.get(), 1, DType::float32, ReduceOp::sum,
                                            rank.stream().get()));
    ASSERT_TRUE(rank.wait(rank.stream()));
    EXPECT_EQ(*number, 3);
  });
  expect_clean(team, 0);
}

// Ranks come to each call in a random order, and streams execute in a random order.
TEST(DeviceCollectives, AreWhatAPlainComputationSaysInEveryOrder) {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    std::mt19937_64 random(seed);
    const int size = 1 + int(random() % 5);
    Team team({.size = size, .execution = FakeCuda::Execution::stepped, .seed = seed});
    team.make_all();
    ASSERT_TRUE(team.connect());
    std::vector<Plan> plans;
    for (int i = 0; i < 8; ++i) plans.push_back(Plan::random(random, size));
    std::vector<std::unique_ptr<Deed>> deeds;
    std::vector<std::size_t> next(static_cast<std::size_t>(size));
    for (std::size_t left = plans.size() * next.size(); left > 0;) {
      const auto rank = random() % next.size();
      if (next[rank] == plans.size()) continue;
      const auto number = next[rank]++;
      deeds.push_back(std::make_unique<Deed>(team, team[int(rank)], plans[number], number));
      --left;
    }
    for (const auto& rank : team.ranks)
      for (const auto& stream : rank->streams) ASSERT_TRUE(rank->wait(stream));
    for (const auto& deed : deeds) deed->check();
    deeds.clear();
    expect_clean(team, 0);
  }
}

TEST(DeviceCollectives, AreWhatAPlainComputationSaysFromThreads) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    Team team({.size = 4, .seed = seed, .first = First::when_asked});
    team.run([&](Team::Rank& rank) {
      ASSERT_TRUE(rank.collectives.connect());
      std::mt19937_64 random(seed);  // All ranks have the same plans.
      std::vector<std::unique_ptr<Deed>> deeds;
      for (std::uint64_t number = 0; number < 15; ++number)
        deeds.push_back(std::make_unique<Deed>(team, rank, Plan::random(random, team.size()), number));
      for (const auto& stream : rank.streams) ASSERT_TRUE(rank.wait(stream));
      for (const auto& deed : deeds) deed->check();
    });
    expect_clean(team, 0);
  }
}

// Everything below is about ranks that do not come, die, leave or meet errors.

/// Queues a sum of one number.
bool queue_sum(Team::Rank& rank) {
  return rank.collectives.all_reduce(rank.memory.get(), rank.memory.get(), 1, DType::float32, ReduceOp::sum,
                                     rank.stream().get());
}

void expect_aborted(Team::Rank& rank) {
  EXPECT_TRUE(rank.collectives.aborted());
  const auto text = message_of<DeviceError>([&] { static_cast<void>(queue_sum(rank)); });
  EXPECT_NE(text.find("the communicator of the team was aborted"), std::string::npos) << text;
  EXPECT_THROW(static_cast<void>(rank.wait(rank.stream())), DeviceError);
  EXPECT_FALSE(rank.device.given_up());
}

TEST(DeviceCollectives, DoNotWaitForEverForARankThatDoesNotCome) {
  Team team({.timeout_s = 0.5});
  auto& rank = team.make(0);
  team.make(1);
  const auto text = message_of<DeviceError>([&] { static_cast<void>(rank.collectives.connect()); });
  EXPECT_NE(
      text.find("ncclCommInitRankConfig: the team of 3 devices hangs: not all ranks have done their part "
                "within 0.5 s; this is rank 0"),
      std::string::npos)
      << text;
  EXPECT_GE(rank.sink.asked, 1) << "signs of life";
  EXPECT_TRUE(rank.collectives.aborted());
  team.ranks.erase(team.ranks.begin() + 2);
  expect_clean(team, 2);
}

TEST(DeviceCollectives, DoNotWaitForEverForARankThatDoesNotQueue) {
  Team team({.size = 2, .timeout_s = 0.1});
  team.make_all();
  ASSERT_TRUE(team.connect());
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
  Team team({.size = 2, .first = First::when_asked, .timeout_s = 0.1});
  team.make_all();
  ASSERT_TRUE(team.connect());
  const auto text = message_of<DeviceError>([&] { static_cast<void>(queue_sum(team[0])); });
  EXPECT_NE(text.find("ncclAllReduce: the team of 2 devices hangs"), std::string::npos) << text;
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
    Team team({.size = 2, .first = queueing ? First::when_asked : First::soon});
    team.make_all();
    ASSERT_TRUE(team.connect());
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
  Team team({.size = 2});
  team.make_all();
  ASSERT_TRUE(team.connect());
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
  Team team({.size = 2, .timeout_s = 1});
  team.nccl.tell_of_aborts();
  team.make_all();
  ASSERT_TRUE(team.connect());
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
    Team team({.size = 2});
    team.nccl.tell_of_aborts();
    team.make_all();
    ASSERT_TRUE(team.connect());
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
    Team team({.size = 2, .timeout_s = timeout_s});
    team.make_all();
    EXPECT_TRUE(team.connect());
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

TEST(DeviceCollectives, HaveADeadlineOfTheirOwnToConnect) {
  Team team({.size = 2});
  const auto text =
      message_of<DeviceError>([&] { static_cast<void>(team.make(0).collectives.connect(0.1)); });
  EXPECT_NE(text.find("within 0.1 s"), std::string::npos) << text;
  expect_aborted(team[0]);
  team.ranks.pop_back();
  expect_clean(team, 1);
}

TEST(DeviceCollectives, AreAbortedByAnAsynchronousErrorAfterTheirEventToo) {
  Team team({.size = 1});
  team.make_all();
  ASSERT_TRUE(team.connect());
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
      EXPECT_NE(std::string(error.what()).find("unhandled system error (2): what the fake knows"),
                std::string::npos)
          << error.what();
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
  Team team({.size = 2});
  team.make_all();
  ASSERT_TRUE(team.connect());
  const auto gather = [&](int rank, std::size_t bytes) {
    auto* memory = team[rank].memory.get();
    return team[rank].collectives.all_gather(memory, memory, bytes, team[rank].stream().get());
  };
  ASSERT_TRUE(gather(0, 4));
  EXPECT_THROW(static_cast<void>(gather(1, 2)), DeviceError);
  EXPECT_THROW(static_cast<void>(team[0].wait(team[0].stream())), DeviceError);
  EXPECT_EQ(team.nccl.mismatches(), Strings{"ncclAllGather of rank 1"});
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
  Team team({.size = 2});
  team.make_all();
  ASSERT_TRUE(team.connect());
  team.nccl.hang("ncclCommAbort");
  const auto begin = base::now_ns();
  team[0].collectives.abort();
  team[0].collectives.abort();
  EXPECT_LT(base::now_ns() - begin, std::int64_t(12e9 * timing::device_settles_s));
  EXPECT_EQ(team.nccl.calls("ncclCommAbort"), 1);
  expect_aborted(team[0]);
}

TEST(DeviceCollectives, OfADeviceThatWasGivenUpMakeNoCall) {
  Team team({.size = 1});
  team.make_all();
  ASSERT_TRUE(team.connect());
  const auto before = team.nccl.calls("ncclCommFinalize") + team.nccl.calls("ncclCommAbort");
  team[0].device.give_up();
  team.ranks.clear();
  EXPECT_EQ(team.nccl.calls("ncclCommFinalize") + team.nccl.calls("ncclCommAbort"), before);
}

}  // namespace
}  // namespace accelmgr::test
