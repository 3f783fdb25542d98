// Tests of collectives of more than 2^31 elements: 2 ranks of uint8, in place, 4.3 GiB in all. A program of
// its own, which runs alone.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "base/ipc/memory.hpp"
#include "world.hpp"

namespace accelmgr::collective::contract {
namespace {

constexpr std::size_t count = (std::size_t{1} << 31) + 7;
constexpr std::uint64_t memory_needed = std::uint64_t{8} << 30;

using Bytes = std::vector<std::byte>;

/// Many repetitions of a period of 251 bytes, which divides no chunk of any usual size. The pattern is long,
/// so that it is quick to write and to compare.
Bytes pattern_of(unsigned factor) {
  Bytes pattern(251 * 4096);
  for (std::size_t i = 0; i < pattern.size(); ++i) pattern[i] = static_cast<std::byte>(i % 251 * factor);
  return pattern;
}

void fill(std::byte* data, const Bytes& pattern) {
  for (std::size_t at = 0; at < count; at += pattern.size())
    std::memcpy(data + at, pattern.data(), std::min(pattern.size(), count - at));
}

std::string difference_from(const Bytes& pattern, const std::byte* data) {
  for (std::size_t at = 0; at < count; at += pattern.size())
    if (std::memcmp(data + at, pattern.data(), std::min(pattern.size(), count - at)) != 0)
      return fmt::format("differs after byte {}", at);
  return {};
}

void reduce_and_broadcast(Rank& self) {
  const auto rank = static_cast<unsigned>(self.world.rank());
  const std::unique_ptr<std::byte[]> data(new std::byte[count]);  // Not zeroed.
  fill(data.get(), pattern_of(3 + 2 * rank));
  self.world.all_reduce(data.get(), data.get(), count, DType::uint8, ReduceOp::sum);
  EXPECT_EQ(difference_from(pattern_of(3 + 5), data.get()), "");
  if (rank == 1) fill(data.get(), pattern_of(11));
  self.world.broadcast(data.get(), count, DType::uint8, 1);
  EXPECT_EQ(difference_from(pattern_of(11), data.get()), "");
}

TEST(Large, MoreThanTwoToTheThirtyFirstBytesAreReducedAndBroadcast) {
  const auto available = ipc::memory_available();
  if (available.bytes < memory_needed)
    GTEST_SKIP() << fmt::format("needs 8 GiB of memory; there are {:.1f} GiB by {}",
                                static_cast<double>(available.bytes) / (1 << 30), available.limited_by);
  for (const auto& failure : run_threads(find_backend("shm"), 2, reduce_and_broadcast, 60))
    ADD_FAILURE() << failure;
}

}  // namespace
}  // namespace accelmgr::collective::contract
