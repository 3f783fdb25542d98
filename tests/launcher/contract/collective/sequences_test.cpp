// Checks that random sequences of collectives, in random groups, give what the oracle says.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <numeric>

#include "call.hpp"
#include "contract.hpp"
#include "world.hpp"

namespace accelmgr::collective::contract {
namespace {

// For each call. Short, because RapidCheck runs a plan that fails again and again, to find a smaller one.
constexpr double timeout_s = 20;

using Sequence = std::vector<std::uint32_t>;
constexpr int most_numbers = sanitized ? 150 : 300;  ///< The most numbers of a plan; a step takes about ten.

/// A group made of another one's members.
struct Group {
  std::size_t parent;
  std::vector<int> of_parent;  ///< By their ranks in the parent.
  std::vector<int> of_world;
};

/// One step: some members of `group` make group number `made`, or all its members make the call.
struct Step {
  std::size_t group;
  bool makes_group;
  std::size_t made;  ///< The new group's number.
  Call call;
};

struct Plan {
  int size = 2;
  std::vector<Group> groups;  ///< Number 0 is the world.
  std::vector<Step> steps;
};

void showValue(const Plan& plan, std::ostream& out) {
  out << plan.size << " ranks\n";
  for (const auto& step : plan.steps) {
    if (step.makes_group)
      out << fmt::format("  group {} of {}: ranks {} of the world\n", step.made, step.group,
                         fmt::join(plan.groups[step.made].of_world, ", "));
    else
      out << fmt::format("  in group {}: {}\n", step.group, describe(step.call));
  }
}

// The numbers that a plan is made from. It is one list, so that RapidCheck shrinks a plan by shrinking the
// list.
class Numbers {
 public:
  explicit Numbers(const Sequence& numbers) : numbers_(numbers) {}
  bool left() const { return at_ < numbers_.size(); }
  std::uint32_t next() { return left() ? numbers_[at_++] : 0; }
  template <class Choice>
  const Choice& one_of(std::span<const Choice> choices) {
    return choices[next() % choices.size()];
  }

 private:
  const Sequence& numbers_;
  std::size_t at_ = 0;
};

std::vector<std::int64_t> shape_of(std::size_t count, std::uint32_t choice) {
  const auto elements = static_cast<std::int64_t>(count);
  if (choice % 3 == 1 && elements % 2 == 0) return {elements / 2, 2};
  if (choice % 3 == 2) return {1, elements, 1};
  return {};
}

std::size_t count_of(std::uint32_t number) {
  switch (number % 8) {
    case 0:
      return number / 8 % 3;
    case 1:
      return number / 8 % (sanitized ? 20'000 : 200'000);
    default:
      return number / 8 % 300;
  }
}

Call next_call(Numbers& numbers, const Group& group) {
  constexpr CallKind kinds[] = {CallKind::all_reduce, CallKind::reduce_scatter, CallKind::all_gather,
                                CallKind::broadcast,  CallKind::all_to_all,     CallKind::barrier};
  Call call;
  call.kind = numbers.one_of<CallKind>(kinds);
  call.dtype = numbers.one_of<DType>(all_dtypes);
  do call.op = numbers.one_of<ReduceOp>(all_ops);
  while (!makes_sense(call.dtype, call.op));
  call.count = count_of(numbers.next());
  call.root = static_cast<int>(numbers.next() % group.of_world.size());
  const auto flags = numbers.next();
  call.in_place = flags & 1;
  call.misaligned = flags & 2;
  call.shape = shape_of(call.count, flags / 4);
  call.seed = numbers.next();
  return call;
}

Group next_group(Numbers& numbers, std::size_t parent, const Group& of) {
  Group group{parent, {}, {}};
  const auto members = of.of_world.size();
  auto chosen = numbers.next() % (1U << members);
  if (chosen == 0) chosen = 1;
  for (std::size_t rank = 0; rank < members; ++rank) {
    if ((chosen >> rank & 1) == 0) continue;
    group.of_parent.push_back(static_cast<int>(rank));
    group.of_world.push_back(of.of_world[rank]);
  }
  return group;
}

Plan plan_of(int size, const Sequence& from) {
  Plan plan;
  plan.size = size;
  std::vector<int> all(static_cast<std::size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  plan.groups.push_back({0, all, all});
  Numbers numbers(from);
  while (numbers.left()) {
    const auto choice = numbers.next();
    const std::size_t group = choice / 4 % plan.groups.size();
    if (choice % 4 == 0 && plan.groups.size() < 8) {
      plan.steps.push_back({group, true, plan.groups.size(), {}});
      plan.groups.push_back(next_group(numbers, group, plan.groups[group]));
    } else {
      plan.steps.push_back({group, false, 0, next_call(numbers, plan.groups[group])});
    }
  }
  return plan;
}

/// Carries out the plan on this rank. A rank skips the steps of groups that it is not in.
void follow(const Plan& plan, Rank& self) {
  std::vector<std::shared_ptr<Communicator>> made(plan.groups.size());
  const auto communicator = [&](std::size_t group) -> Communicator& {
    return group == 0 ? self.world : *made[group];
  };
  for (const auto& step : plan.steps) {
    if (step.makes_group) {
      const auto& group = plan.groups[step.made];
      if (!contains(group.of_world, self.world.rank())) continue;
      const auto made_now = made[step.made] = communicator(step.group).group(group.of_parent);
      EXPECT_EQ(made_now->ranks(), group.of_world);
      EXPECT_EQ(made_now->size(), static_cast<int>(group.of_world.size()));
      EXPECT_EQ(group.of_world.at(static_cast<std::size_t>(made_now->rank())), self.world.rank());
    } else if (contains(plan.groups[step.group].of_world, self.world.rank())) {
      EXPECT_EQ(perform(step.call, communicator(step.group), self.backend.in_rank_order), "");
    }
  }
}

std::vector<Backend> backends_with_threads() {
  std::vector<Backend> found;
  for (const auto& backend : backends())
    if (contains(backend.sizes, 4) &&
        std::find(backend.starts.begin(), backend.starts.end(), Start::threads) != backend.starts.end())
      found.push_back(backend);
  return found;
}

class Sequences : public testing::TestWithParam<Backend> {};

}  // namespace

TEST_P(Sequences, OfRandomCollectivesInRandomGroupsEqualTheOracle) {
  const auto& backend = GetParam();
  EXPECT_TRUE(rc::check("every result is the oracle's", [&backend] {
    // Numbers of the full range from the first plan on.
    const auto number = rc::gen::resize(rc::kNominalSize, rc::gen::inRange<std::uint32_t>(0, 1U << 31));
    const auto size = *rc::gen::resize(rc::kNominalSize, rc::gen::inRange(2, 6));
    const auto plan = plan_of(size, *rc::gen::resize(most_numbers, rc::gen::container<Sequence>(number)));
    RC_LOG() << rc::toString(plan);
    for (const auto& failure : run_threads(
             backend, plan.size, [&plan](Rank& self) { follow(plan, self); }, timeout_s))
      RC_FAIL(failure);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, Sequences, testing::ValuesIn(backends_with_threads()),
                         [](const auto& info) { return info.param.name; });

}  // namespace accelmgr::collective::contract
