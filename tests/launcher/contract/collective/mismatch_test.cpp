// Checks that members that do not make the same call are all told which rank called what, before a buffer is
// touched.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>

#include "call.hpp"
#include "contract.hpp"
#include "launcher/collective/expect_error.hpp"
#include "refusal.hpp"

namespace accelmgr::collective::contract {
namespace {

using Cause = CollectiveError::Cause;
using test::expect_error;
using test::says;

constexpr std::array<std::int64_t, 2> two_by_three{2, 3}, three_by_two{3, 2};

CallOptions with_shape(std::span<const std::int64_t> shape) {
  CallOptions options;
  options.shape = shape;
  return options;
}

/// A call, and how an error describes it. Its buffers have room for each of the calls below.
struct Made {
  std::string text;
  std::function<void(Communicator&, std::byte* in, std::byte* out)> call;
};

Made all_reduce(std::string text, std::size_t count, DType dtype, ReduceOp op, CallOptions options = {}) {
  return {std::move(text), [=](Communicator& world, std::byte* in, std::byte* out) {
            world.all_reduce(in, out, count, dtype, op, options);
          }};
}

Made broadcast(std::string text, int root) {
  return {std::move(text), [=](Communicator& world, std::byte*, std::byte* out) {
            world.broadcast(out, 6, DType::float32, root);
          }};
}

Made plain() { return all_reduce("all_reduce SUM float32 [6]", 6, DType::float32, ReduceOp::sum); }

std::string names_of(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

void expect_same_work(Communicator& world) {
  EXPECT_EQ(perform({.kind = CallKind::all_reduce, .dtype = DType::int32, .count = 1000}, world), "");
}

/// The member `odd` calls `other`, and all other members call `usual`: every member must be told. `world` is
/// any communicator.
void expect_told(const Made& usual, const Made& other, int odd, Communicator& world) {
  std::vector<std::byte> in(4096, std::byte{3}), out(4096, std::byte{4});
  std::vector<int> same = world.ranks();
  same.erase(same.begin() + odd);
  const auto odd_rank = world.ranks()[static_cast<std::size_t>(odd)];
  SCOPED_TRACE(fmt::format("{} with {} on {}", usual.text, other.text, odd));
  const auto what = expect_error(Cause::mismatch, odd == 0 ? same : std::vector{odd_rank}, [&] {
    (world.rank() == odd ? other : usual).call(world, in.data(), out.data());
  });
  EXPECT_TRUE(
      says(what, {names_of(same) + " called " + usual.text, names_of({odd_rank}) + " called " + other.text}));
  EXPECT_EQ(std::count(in.begin(), in.end(), std::byte{3}), 4096) << "touched the input";
  EXPECT_EQ(std::count(out.begin(), out.end(), std::byte{4}), 4096) << "touched the output";
  expect_same_work(world);
}

void expect_told_by_each(const Made& usual, const Made& other, Rank& self) {
  expect_told(usual, other, 0, self.world);
  expect_told(usual, other, self.world.size() - 1, self.world);
}

Made gather(std::size_t count) {
  return {fmt::format("all_gather float32 [{}]", count),
          [=](Communicator& world, std::byte* in, std::byte* out) {
            world.all_gather(in, out, count, DType::float32);
          }};
}

const Made barrier{"barrier", [](Communicator& world, std::byte*, std::byte*) { world.barrier(); }};
const Made scatter{"reduce_scatter SUM float32 [6]", [](Communicator& world, std::byte* in, std::byte* out) {
                     world.reduce_scatter(in, out, 6, DType::float32, ReduceOp::sum);
                   }};
const Made exchange{"all_to_all float32 [6]", [](Communicator& world, std::byte* in, std::byte* out) {
                      world.all_to_all(in, out, 6, DType::float32);
                    }};
const Made objects{"all_gather of objects",
                   [](Communicator& world, std::byte*, std::byte*) { world.all_gather_objects("object"); }};
Made object_from(int root) {
  return {fmt::format("broadcast of an object from rank {}", root),
          [=](Communicator& world, std::byte*, std::byte*) { world.broadcast_object("object", root); }};
}

}  // namespace

CONTRACT(Mismatch, OfTheKindIsToldToAll, .fewest_ranks = 2) {
  const Made kinds[] = {plain(),  scatter, gather(6), broadcast("broadcast from rank 0 float32 [6]", 0),
                        exchange, barrier, objects,   object_from(0)};
  // Each kind against the next one.
  for (std::size_t i = 0; i < std::size(kinds); ++i)
    expect_told_by_each(kinds[i], kinds[(i + 1) % std::size(kinds)], self);
}

CONTRACT(Mismatch, OfAnyArgumentIsToldToAll, .fewest_ranks = 2) {
  const auto sum = [](const std::string& shape, std::size_t count, CallOptions options = {}) {
    return all_reduce("all_reduce SUM float32 " + shape, count, DType::float32, ReduceOp::sum, options);
  };
  auto on_devices = with_shape(two_by_three);
  on_devices.on_devices = true;
  const auto scalar = with_shape({two_by_three.data(), 0});
  const std::pair<Made, Made> rows[] = {
      {plain(), all_reduce("all_reduce SUM int32 [6]", 6, DType::int32, ReduceOp::sum)},
      {plain(), all_reduce("all_reduce MAX float32 [6]", 6, DType::float32, ReduceOp::max)},
      {broadcast("broadcast from rank 0 float32 [6]", 0), broadcast("broadcast from rank 1 float32 [6]", 1)},
      {object_from(0), object_from(1)},
      {sum("[2, 3]", 6, with_shape(two_by_three)), sum("[3, 2]", 6, with_shape(three_by_two))},
      {plain(), sum("[2, 3]", 6, with_shape(two_by_three))},
      {sum("[2, 3]", 6, with_shape(two_by_three)), sum("[2, 3] on a device", 0, on_devices)},
      {sum("[1]", 1), sum("[]", 1, scalar)},
      {plain(), sum("[7]", 7)},
      {plain(), sum("[0]", 0)},
      {gather(5), gather(6)},
  };
  for (const auto& [usual, other] : rows) expect_told_by_each(usual, other, self);
}

CONTRACT(Mismatch, OfLargeCallsIsToldToAll, .fewest_ranks = 2) {
  // Both calls need many chunks. The buffer has room for either.
  constexpr std::size_t large = sanitized ? 1 << 19 : 3 << 20;
  std::vector<std::byte> data(large, std::byte{5});
  const int odd = self.world.size() - 1;
  expect_error(Cause::mismatch, {odd}, [&] {
    self.world.broadcast(data.data(), self.world.rank() == odd ? large - 1 : large, DType::uint8, 0);
  });
  EXPECT_EQ(static_cast<std::size_t>(std::count(data.begin(), data.end(), std::byte{5})), large);
  expect_same_work(self.world);
}

CONTRACT(Mismatch, OfThreeDifferentCallsNamesAllThree, .fewest_ranks = 3) {
  const Made calls[] = {plain(), barrier, gather(6)};
  std::vector<std::byte> in(4096), out(4096);
  std::vector<int> differ = self.world.ranks();
  differ.erase(differ.begin());
  const auto what = expect_error(Cause::mismatch, differ, [&] {
    calls[std::min(self.world.rank(), 2)].call(self.world, in.data(), out.data());
  });
  for (const auto& call : calls) EXPECT_TRUE(says(what, {"called " + call.text}));
  expect_same_work(self.world);
}

CONTRACT(Mismatch, InAGroupNamesRanksOfTheWorldAndLeavesTheWorldAlone, .fewest_ranks = 3) {
  const int first = self.world.size() - 2;
  if (self.world.rank() >= first) {
    const auto group = self.world.group(std::vector<int>{first, first + 1});
    expect_told(plain(), barrier, 1, *group);
  }
  expect_same_work(self.world);
}

}  // namespace accelmgr::collective::contract
