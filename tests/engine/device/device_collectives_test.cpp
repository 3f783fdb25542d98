// What collectives of devices compute, against a plain computation.
#include "base/cuda/device_collectives.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "team.hpp"

namespace accelmgr::test {
namespace {

using First = FakeNccl::FirstOperation;

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
    to_ = rank.device.allocate(4 * to_count + 1);
    auto *from = from_.get(), *to = to_.get();
    const auto own = std::size_t(rank.collectives.rank()) * plan.count * 4;
    if (in_place && plan.kind == Plan::all_gather)
      from = to + own;
    else if (in_place)
      to = from + (plan.kind == Plan::reduce_scatter ? own : 0);
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

// Ranks come to each call in a random order, and streams execute in a random order.
TEST(DeviceCollectives, AreWhatAPlainComputationSaysInEveryOrder) {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    std::mt19937_64 random(seed);
    const int size = 1 + int(random() % 5);
    ConnectedTeam team({.size = size, .execution = FakeCuda::Execution::stepped, .seed = seed});
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

}  // namespace
}  // namespace accelmgr::test
