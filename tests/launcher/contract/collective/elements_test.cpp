// Checks that collectives of elements give what the oracle says, on every rank, for every dtype and any size.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "call.hpp"
#include "contract.hpp"

namespace accelmgr::collective::contract {
namespace {

const std::vector<std::size_t> small_counts =
    sanitized ? std::vector<std::size_t>{0, 1, 33} : std::vector<std::size_t>{0, 1, 257};
/// More than any staging buffer holds, and no multiple of any usual size. large_block_bytes is for calls that
/// have a block for each rank.
constexpr std::size_t large_bytes = (sanitized ? 1 << 20 : 4 << 20) + 4099;
constexpr std::size_t large_block_bytes = (sanitized ? 1 << 19 : 1 << 20) + 4099;

void expect_right(const Call& call, Rank& self) {
  EXPECT_EQ(perform(call, self.world, self.backend.in_rank_order), "");
}

/// Makes the call in place and not, with buffers at even addresses and at odd ones.
void expect_right_anywhere(Call call, Rank& self) {
  for (const bool in_place : {false, true})
    for (const bool misaligned : {false, true}) {
      if (sanitized && in_place != misaligned) continue;
      call.in_place = in_place;
      call.misaligned = misaligned;
      ++call.seed;
      expect_right(call, self);
    }
}

void expect_right_for_every_dtype(CallKind kind, int root, Rank& self) {
  for (const auto dtype : all_dtypes)
    for (const auto count : small_counts)
      expect_right_anywhere({.kind = kind, .dtype = dtype, .count = count, .root = root}, self);
}

void expect_right_when_large(CallKind kind, std::size_t bytes, Rank& self) {
  const int root = self.world.size() - 1;
  expect_right({.kind = kind, .dtype = DType::float32, .count = bytes / 4, .root = root}, self);
  expect_right({.kind = kind, .dtype = DType::bfloat16, .count = bytes / 2, .root = root, .in_place = true},
               self);
  expect_right({.kind = kind, .dtype = DType::uint8, .count = bytes, .root = root, .misaligned = true}, self);
}

/// Makes the call with `bytes` bytes, with one element less and with one more.
void expect_right_around(std::size_t bytes, Call call, Rank& self) {
  const auto elements = bytes / size_of(call.dtype);
  for (call.count = elements - 1; call.count <= elements + 1; ++call.count) expect_right(call, self);
}

}  // namespace

CONTRACT(Reductions, EqualTheOracleForEveryDtypeAndOp) {
  for (const auto kind : {CallKind::all_reduce, CallKind::reduce_scatter})
    for (const auto dtype : all_dtypes)
      for (const auto op : all_ops) {
        if (!makes_sense(dtype, op)) continue;
        for (const auto count : small_counts)
          expect_right_anywhere({.kind = kind, .dtype = dtype, .op = op, .count = count}, self);
      }
}
CONTRACT(Collectives, OfBlocksEqualTheOracleForEveryDtype) {
  expect_right_for_every_dtype(CallKind::all_gather, 0, self);
  expect_right_for_every_dtype(CallKind::all_to_all, 0, self);
}
CONTRACT(Broadcast, FromEveryRootEqualsTheOracleForEveryDtype) {
  for (int root = 0; root < self.world.size(); ++root)
    expect_right_for_every_dtype(CallKind::broadcast, root, self);
}

CONTRACT(Collectives, OfMoreThanIsStagedAtATimeEqualTheOracle) {
  for (const auto kind : {CallKind::all_reduce, CallKind::broadcast})
    expect_right_when_large(kind, large_bytes, self);
  for (const auto kind : {CallKind::reduce_scatter, CallKind::all_gather, CallKind::all_to_all})
    expect_right_when_large(kind, large_block_bytes, self);
}

CONTRACT(Collectives, OfSizesAroundPowersOfTwoEqualTheOracle) {
  for (const std::size_t bytes : {64U, 4096U, 65536U, 262144U}) {
    expect_right_around(bytes, {.kind = CallKind::all_reduce, .dtype = DType::float32}, self);
    expect_right_around(bytes, {.kind = CallKind::reduce_scatter, .dtype = DType::int16}, self);
    expect_right_around(bytes, {.kind = CallKind::all_gather, .dtype = DType::uint8}, self);
    expect_right_around(bytes, {.kind = CallKind::all_to_all, .dtype = DType::int64}, self);
    expect_right_around(bytes, {.kind = CallKind::broadcast, .dtype = DType::complex128}, self);
  }
}

namespace {

template <class Number>
std::vector<Number> special_numbers(int rank) {
  using Limits = std::numeric_limits<Number>;
  const std::vector<Number> numbers{
      Limits::quiet_NaN(), -Limits::quiet_NaN(), Limits::infinity(), -Limits::infinity(), Number{0},
      -Number{0},          Limits::denorm_min(), Limits::max(),      Number{1} / 3};
  // Every number of an even rank meets every number of an odd rank.
  std::vector<Number> of_rank;
  for (std::size_t i = 0; i < numbers.size() * numbers.size(); ++i)
    of_rank.push_back(numbers[(rank % 2 == 0 ? i : i / numbers.size()) % numbers.size()]);
  return of_rank;
}

template <class Number>
void expect_same_bits(DType dtype, Rank& self) {
  const auto in = special_numbers<Number>(self.world.rank());
  for (const auto op : all_ops) {
    if (!makes_sense(dtype, op)) continue;
    std::vector<Number> out(in.size());
    self.world.all_reduce(in.data(), out.data(), in.size(), dtype, op);
    const std::string bits(reinterpret_cast<const char*>(out.data()), out.size() * sizeof(Number));
    for (const auto& of_other : self.world.all_gather_objects(bits))
      EXPECT_TRUE(of_other == bits) << name_of(op) << " of " << name_of(dtype);
  }
}

}  // namespace

CONTRACT(AllReduce, GivesTheSameBitsOnAllRanksWhateverTheNumbers) {
  expect_same_bits<float>(DType::float32, self);
  expect_same_bits<double>(DType::float64, self);
}

CONTRACT(AllReduce, OfSixteenBitsIsRoundedOnceAtTheEnd) {
  // 1 + 2^-9 + 2^-9 + ... in bfloat16, whose ulp above 1 is 2^-7: rounded one by one, all additions would be
  // lost.
  const int size = self.world.size();
  const std::uint16_t one = 0x3f80, small = 0x3b00;  // bfloat16: 1 and 2^-9.
  std::uint16_t sum = self.world.rank() == 0 ? one : small;
  self.world.all_reduce(&sum, &sum, 1, DType::bfloat16, ReduceOp::sum);
  // 2^-9 is a quarter of an ulp: up to two of them are lost (a tie goes to even), more are not.
  EXPECT_EQ(sum, size <= 3 ? 0x3f80 : size <= 6 ? 0x3f81 : 0x3f82) << size;
}

CONTRACT(Barrier, ReturnsWhenAllHaveCalledIt) {
  const auto size = static_cast<std::uint64_t>(self.world.size());
  for (std::uint64_t round = 1; round <= 50; ++round) {
    self.meeting.count();
    self.world.barrier();
    EXPECT_GE(self.meeting.counted(), size * round);
  }
}

CONTRACT(World, KnowsItsMembers) {
  EXPECT_EQ(self.world.ranks(), all_of(self.world));
  EXPECT_TRUE(self.backend.name.starts_with(self.world.backend())) << self.world.backend();
}

}  // namespace accelmgr::collective::contract
