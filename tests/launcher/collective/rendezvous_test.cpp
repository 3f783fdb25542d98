// Tests of rendezvous(), by which ranks that share only a store meet.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <thread>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/ipc/address.hpp"
#include "expect_error.hpp"
#include "launcher/collective/nodes/nodes.hpp"
#include "launcher/distributed/store/file_store.hpp"
#include "message_of.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::collective {
namespace {

using test::message_of;
using testing::HasSubstr;

/// Runs body(store, membership) for each rank, in a thread of its own.
void run_ranks(int size, const std::function<void(Store&, Membership)>& body) {
  const accelmgr::test::TemporaryFolder folder;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      distributed::FileStore store(folder / "store", base::Deadline::in_seconds(60));
      body(store, {.rank = rank, .size = size, .timeout_s = 60, .interface = {}});
    });
}

TEST(Rendezvous, RanksOfOneNodeMeetInSharedMemory) {
  for (const char* backend : {"auto", "shm"})
    run_ranks(3, [&](Store& store, Membership membership) {
      membership.backend = backend;
      const auto world = rendezvous(store, "world", membership);
      EXPECT_EQ(world->backend(), "shm");
      EXPECT_EQ(world->rank(), membership.rank);
      EXPECT_EQ(world->ranks(), (std::vector{0, 1, 2}));
      std::int64_t sum = membership.rank;
      world->all_reduce(&sum, &sum, 1, DType::int64, ReduceOp::sum);
      EXPECT_EQ(sum, 3);
    });
}

TEST(Rendezvous, OneStoreServesSeveralWorlds) {
  run_ranks(2, [](Store& store, const Membership& membership) {
    const auto one = rendezvous(store, "one", membership);
    const auto other = rendezvous(store, "other", membership);
    other->barrier();
    one->barrier();
  });
}

TEST(Rendezvous, WhoDoesNotComeIsNamed) {
  run_ranks(4, [](Store& store, Membership membership) {
    if (membership.rank % 2 == 1) return;
    // Rank 0 gives up, and tells rank 2, which must have come before.
    if (membership.rank == 0) {
      store.get("world/node/came/2", base::Deadline::in_seconds(60));
      membership.timeout_s = 1;
    }
    EXPECT_THAT(test::expect_error(CollectiveError::Cause::timeout, {1, 3},
                                   [&] { rendezvous(store, "world", membership); }),
                HasSubstr("ranks 1, 3 did not join the rendezvous 'world/node' within 1 s"));
  });
}

TEST(Rendezvous, AnUnknownBackendAndARankOutsideTheWorldAreRefused) {
  run_ranks(1, [](Store& store, Membership membership) {
    membership.backend = "mpi";
    EXPECT_THAT(message_of<ConfigError>([&] { rendezvous(store, "world", membership); }),
                HasSubstr("unknown backend 'mpi'; it must be auto, shm or gloo"));
    membership.rank = 1;
    EXPECT_THAT(message_of<UsageError>([&] { rendezvous(store, "world", membership); }),
                HasSubstr("rank 1 is not valid in a world of 1 ranks"));
  });
}

TEST(LocalAddress, AnUnknownInterfaceListsThoseThereAre) {
  EXPECT_THAT(message_of<ConfigError>([] { ipc::local_address("eth99"); }),
              testing::AllOf(HasSubstr("there is no network interface 'eth99'"), HasSubstr("lo")));
}

TEST(Gloo, TakesTimeoutsBeyondAnyWait) {
  for (const double timeout_s : {1e12, std::numeric_limits<double>::infinity()})
    run_ranks(2, [&](Store& store, Membership membership) {
      membership.timeout_s = timeout_s;
      membership.interface = "lo";
      membership.node = fmt::format("node of rank {}", membership.rank);
      const auto world = rendezvous(store, "world", membership);
      EXPECT_EQ(world->backend(), "gloo");
      std::int64_t sum = membership.rank;
      world->all_reduce(&sum, &sum, 1, DType::int64, ReduceOp::sum);
      EXPECT_EQ(sum, 1);
      world->barrier();
    });
}

}  // namespace
}  // namespace accelmgr::collective
