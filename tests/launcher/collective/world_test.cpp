// Tests of shm worlds: which processes may join one, and that groups return the memory and the places that
// they took.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/stat.h>

#include "launcher/collective/shm/layout.hpp"
#include "launcher/collective/shm/memory.hpp"
#include "launcher/collective/shm/world.hpp"
#include "message_of.hpp"
#include "refusal.hpp"
#include "worlds.hpp"

namespace accelmgr::collective {
namespace {

using accelmgr::test::message_of;
using accelmgr::test::says;
using test::long_s;

std::shared_ptr<Communicator> join(int world, int rank) {
  return shm::join_world(world, rank, {.timeout_s = long_s, .world_ranks = {}});
}

std::int64_t bytes_in_use(int fd) {
  struct stat file;
  EXPECT_EQ(fstat(fd, &file), 0);
  return file.st_blocks * 512;
}

TEST(World, RefusesStrangers) {
  const auto empty = ipc::create_memfd("stranger", 0, ipc::Allocate::later);
  EXPECT_TRUE(says(message_of<SessionError>([&] { join(empty.get(), 0); }), {"not the memory of a world"}));
  const auto other = ipc::create_memfd("stranger", 1 << 16);
  EXPECT_TRUE(says(message_of<SessionError>([&] { join(other.get(), 0); }), {"not the memory of a world"}));
}

TEST(World, RefusesEveryNumberThatIsNotOfItsPlan) {
  constexpr std::size_t first = offsetof(shm::Header, ranks);
  constexpr std::size_t end = offsetof(shm::Header, parks) + sizeof(shm::Header::parks);
  for (std::size_t at = first; at < end; ++at) {
    for (const int value : {0x01, 0x80, 0xff}) {
      const auto world = shm::create_world(2);
      unsigned char byte = 0;
      ASSERT_EQ(pread(world.get(), &byte, 1, static_cast<off_t>(at)), 1);
      byte = static_cast<unsigned char>(byte ^ value);
      ASSERT_EQ(pwrite(world.get(), &byte, 1, static_cast<off_t>(at)), 1);
      const auto message = message_of<SessionError>([&] { join(world.get(), 0); });
      EXPECT_TRUE(says(message, {"not the memory of a world"}) || says(message, {"another build"}))
          << "byte " << at << " of the header, changed by " << value << ": " << message;
    }
  }
}

TEST(World, RefusesAnotherBuild) {
  const auto world = shm::create_world(2);
  const std::uint64_t other_build = shm::build_fingerprint() + 1;
  ASSERT_EQ(pwrite(world.get(), &other_build, sizeof other_build, offsetof(shm::Header, fingerprint)),
            static_cast<ssize_t>(sizeof other_build));
  EXPECT_TRUE(says(message_of<SessionError>([&] { join(world.get(), 0); }), {"another build"}));
}

TEST(World, RefusesMemoryThatCanShrink) {
  const auto world = shm::create_world(1);
  const base::UniqueFd copy(memfd_create("copy", MFD_CLOEXEC));
  struct stat file;
  ASSERT_EQ(fstat(world.get(), &file), 0);
  ASSERT_EQ(ftruncate(copy.get(), file.st_size), 0);
  std::vector<char> head(4096);
  ASSERT_EQ(pread(world.get(), head.data(), head.size(), 0), static_cast<ssize_t>(head.size()));
  ASSERT_EQ(pwrite(copy.get(), head.data(), head.size(), 0), static_cast<ssize_t>(head.size()));
  EXPECT_TRUE(says(message_of<SessionError>([&] { join(copy.get(), 0); }), {"can be shrunk"}));
}

TEST(World, RefusesARankThatIsTakenOrDoesNotExist) {
  const auto world = shm::create_world(2);
  const auto first = join(world.get(), 0);
  const auto taken = message_of<SessionError>([&] { join(world.get(), 0); });
  EXPECT_TRUE(says(taken, {"rank 0 of this world is already taken by process " + std::to_string(getpid())}));
  EXPECT_TRUE(says(message_of<UsageError>([&] { join(world.get(), 2); }), {"rank 2"}));
  EXPECT_TRUE(says(message_of<UsageError>([&] { join(world.get(), -1); }), {"rank -1"}));
  message_of<UsageError>([] { shm::create_world(0); });
  message_of<UsageError>([] { shm::create_world(shm::most_ranks + 1); });
  message_of<UsageError>([&] {
    shm::join_world(world.get(), 1, {.timeout_s = long_s, .world_ranks = {1, 2, 3}});
  });
}

TEST(World, CanBeJoinedAgainByAllAfterAllHaveLeft) {
  const auto world = shm::create_world(2);
  for (int time = 0; time < 3; ++time) {
    std::jthread other([&] { EXPECT_EQ(join(world.get(), 1)->broadcast_object("", 0), "hello"); });
    EXPECT_EQ(join(world.get(), 0)->broadcast_object("hello", 0), "hello");
  }
}

TEST(World, IsRefusedWhenMemoryIsShort) {
  // A sparse file of 64 TiB: the allocation must fail, and must leave nothing allocated.
  constexpr std::size_t much = std::size_t{1} << 46;
  const auto fd = ipc::create_memfd("much", much, ipc::Allocate::later);
  const auto message = message_of<SessionError>([&] { shm::allocate_range(fd.get(), 4096, much - 4096); });
  EXPECT_TRUE(says(message, {std::to_string(much - 4096) + " bytes are needed"}));
  EXPECT_EQ(bytes_in_use(fd.get()), 0);
}

int spin_us_of_two(int rank_0_on, int rank_1_on, shm::Waiting waiting = shm::Waiting::by_cores) {
  const auto world = shm::create_world(2, waiting);
  const auto pinned = [&](int rank, int core) {
    std::unique_ptr<shm::World> joined;
    std::jthread([&] {
      cpu_set_t cores;
      CPU_ZERO(&cores);
      CPU_SET(core, &cores);
      EXPECT_EQ(sched_setaffinity(0, sizeof cores, &cores), 0);
      joined = std::make_unique<shm::World>(world.get(), rank, long_s, std::vector<int>{});
      joined->join();
    }).join();
    return joined;
  };
  const auto first = pinned(0, rank_0_on);
  EXPECT_EQ(first->spin_us(), 0) << "before all have come";
  const auto second = pinned(1, rank_1_on);
  EXPECT_EQ(first->spin_us(), second->spin_us());
  return second->spin_us();
}

TEST(World, SpinsWhereEachRankHasACoreOfItsOwn) {
  cpu_set_t cores;
  ASSERT_EQ(sched_getaffinity(0, sizeof cores, &cores), 0);
  std::vector<int> usable;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &cores)) usable.push_back(core);
  if (usable.size() < 2) GTEST_SKIP() << "this process may use one core only";
  EXPECT_GT(spin_us_of_two(usable[0], usable[1]), 0);
  EXPECT_EQ(spin_us_of_two(usable[1], usable[1]), 0) << "both are pinned to one core";
  EXPECT_EQ(spin_us_of_two(usable[0], usable[1], shm::Waiting::parked), 0);
}

TEST(Groups, ReturnWhatTheyTook) {
  const auto world = shm::create_world(2);
  const auto body = [&](int rank) {
    const auto communicator = join(world.get(), rank);
    const int both[] = {0, 1};
    for (int time = 0; time < 3 * static_cast<int>(shm::slots); ++time) {
      const auto group = communicator->group(both);
      if (time % 100 == 0) {
        std::vector<float> data(100'000);
        group->all_reduce(data.data(), data.data(), data.size(), DType::float32, ReduceOp::sum);
      }
    }
    communicator->barrier();
  };
  {
    std::jthread other(body, 1);
    body(0);
  }
  // The memory of all groups is free again: only the table of groups is in use.
  EXPECT_LE(bytes_in_use(world.get()), 64 * 1024);
}

TEST(Groups, OfTheDeadMakeRoom) {
  const auto world = shm::create_world(2);
  {
    std::vector<ipc::Child> ranks;
    for (int rank = 0; rank < 2; ++rank)
      ranks.push_back(test::checked_child([&] {
        const auto communicator = join(world.get(), rank);
        const int both[] = {0, 1};
        std::vector<std::shared_ptr<Communicator>> groups;
        for (std::size_t i = 1; i < shm::slots; ++i) groups.push_back(communicator->group(both));
        const auto message = message_of<SessionError>([&] { communicator->group(both); });
        EXPECT_TRUE(says(message, {"128 groups at the same time"}));
        communicator->barrier();
        fflush(nullptr);
        _exit(testing::Test::HasFailure() ? 1 : 0);  // Skips destructors, which would leave the groups.
      }));
    for (const auto& rank : ranks) EXPECT_EQ(ipc::test::end_of(rank), "exit code 0");
  }
  std::jthread other([&] { join(world.get(), 1)->barrier(); });
  join(world.get(), 0)->barrier();
}

TEST(Groups, OfTheSameMembersFromDifferentParentsAreNotMixedUp) {
  test::run_threads(3, [](Communicator& world) {
    const int all[] = {0, 1, 2};
    const int low[] = {0, 1};
    const auto copy = world.group(all);
    if (world.rank() == 2) return;
    // Two threads of each rank ask the two parents, so the ranks may ask in different orders.
    std::shared_ptr<Communicator> from_world, from_copy;
    std::jthread first([&] { from_world = world.group(low); });
    from_copy = copy->group(low);
    first.join();
    std::jthread sends([&] { from_world->barrier(); });
    EXPECT_EQ(from_copy->broadcast_object("copy", 0), "copy");
  });
}

}  // namespace
}  // namespace accelmgr::collective
