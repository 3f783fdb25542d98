// Tests of objects: bytes of any length, which may differ from member to member.
#include "contract.hpp"

namespace accelmgr::collective::contract {
namespace {

constexpr std::size_t large_object_bytes = (sanitized ? 1 << 19 : 3 << 20) + 7;
constexpr std::size_t lengths[] = {0, 1, 100 * 1024, 3};

/// Bytes with zeros among them that differ from rank to rank.
std::string object_of(int rank, std::size_t length) {
  std::string object(length, '\0');
  for (std::size_t i = 0; i < length; ++i)
    object[i] = static_cast<char>((i * 7 + i / 251 + static_cast<std::size_t>(rank) * 31) & 0xff);
  return object;
}

std::size_t length_of(int rank, std::size_t round) {
  return lengths[(static_cast<std::size_t>(rank) + round) % std::size(lengths)];
}

void expect_all(const std::vector<std::string>& found, int size, std::size_t round) {
  ASSERT_EQ(found.size(), static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank)
    EXPECT_TRUE(found[static_cast<std::size_t>(rank)] == object_of(rank, length_of(rank, round)))
        << "of rank " << rank << " in round " << round;
}

}  // namespace

CONTRACT(AllGatherObjects, OfDifferentLengthsArriveInTheOrderOfRanks) {
  for (std::size_t round = 0; round < std::size(lengths); ++round) {
    const auto mine = object_of(self.world.rank(), length_of(self.world.rank(), round));
    expect_all(self.world.all_gather_objects(mine), self.world.size(), round);
  }
}

CONTRACT(AllGatherObjects, OfManyBytesFromOneMember) {
  const int last = self.world.size() - 1;
  const auto large = object_of(last, large_object_bytes);
  const auto found = self.world.all_gather_objects(self.world.rank() == last ? large : std::string("small"));
  ASSERT_EQ(found.size(), static_cast<std::size_t>(last) + 1);
  EXPECT_TRUE(found.back() == large);
  for (int rank = 0; rank < last; ++rank) EXPECT_EQ(found[static_cast<std::size_t>(rank)], "small");
}

CONTRACT(BroadcastObject, OfEveryRootIsReturnedAndTheOthersNotLookedAt) {
  for (int root = 0; root < self.world.size(); ++root)
    for (const auto length : {std::size_t{0}, std::size_t{1}, std::size_t{100} * 1024, large_object_bytes}) {
      const auto object = object_of(root, length);
      const bool is_root = self.world.rank() == root;
      const std::string others(static_cast<std::size_t>(self.world.rank()) * 1000, 'x');
      EXPECT_TRUE(self.world.broadcast_object(is_root ? object : others, root) == object)
          << length << " bytes from rank " << root;
    }
}

}  // namespace accelmgr::collective::contract
