// Tests of Mesh: what the other members see when one has done its part and leaves.
#include "launcher/collective/tcp/mesh.hpp"

#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <future>
#include <numeric>
#include <thread>

#include "base/ipc/processes.hpp"
#include "expect_error.hpp"
#include "launcher/distributed/store/file_store.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::collective::tcp {
namespace {

constexpr double patience_s = 60;
constexpr const char* address = "127.0.0.1";

base::Deadline soon() { return base::Deadline::in_seconds(patience_s); }

class MeshTest : public testing::Test {
 protected:
  /// Joins the mesh as `rank`. Blocks until all ranks have come.
  std::unique_ptr<Mesh> join(int rank, int size) {
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    distributed::FileStore store(folder_ / "store", soon());
    SharedStore shared(store);
    return std::make_unique<Mesh>(shared, Mesh::Place{"mesh", rank, ranks, address}, patience_s, soon());
  }
  template <std::size_t size>
  std::array<std::unique_ptr<Mesh>, size> join_all() {
    std::array<std::unique_ptr<Mesh>, size> meshes;
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < size; ++rank)
      threads.emplace_back([&, rank] { meshes[rank] = join(static_cast<int>(rank), size); });
    threads.clear();
    return meshes;
  }

  accelmgr::test::TemporaryFolder folder_;
};

/// More than the kernel buffers for a receiver that does not read, and less than it buffers for the sender.
const std::string large(128 << 10, 'x');

/// The part of rank 1: tells rank 2 that it is ready, and receives `large` from rank 0.
bool takes_all(Mesh& mesh) {
  std::string taken(large.size(), '\0');
  const char ready = 1;
  mesh.exchange({{Mesh::Send{2, &ready, 1}}}, {{Mesh::Receive{0, taken.data(), taken.size()}}}, soon());
  return taken == large;
}

TEST_F(MeshTest, WhoLeavesAtOnceLosesNothingOfWhatItHasSent) {
  const auto slow = ipc::test::fork_child([this] { return takes_all(*join(1, 3)) ? 0 : 1; });
  std::promise<void> stopped;
  std::jthread rank2([&] {
    const auto mesh = join(2, 3);
    char ready = 0;
    mesh->exchange({}, {{Mesh::Receive{1, &ready, 1}}}, soon());
    kill(slow.pid, SIGSTOP);
    waitpid(slow.pid, nullptr, WUNTRACED);
    stopped.set_value();
  });
  auto mesh = join(0, 3);
  stopped.get_future().wait();
  mesh->exchange({{Mesh::Send{1, large.data(), large.size()}}}, {}, soon());
  mesh.reset();
  rank2.join();
  kill(slow.pid, SIGCONT);
  EXPECT_EQ(ipc::test::end_of(slow), "exit code 0");
}

/// Receives a byte from `rank`, which sends none. The failure must have the cause and name the rank.
void expect_missed(Mesh& mesh, int rank, CollectiveError::Cause cause, base::Deadline deadline) {
  char byte = 0;
  try {
    mesh.exchange({}, {{Mesh::Receive{rank, &byte, 1}}}, deadline);
    ADD_FAILURE() << "rank " << rank << " sent nothing";
  } catch (const ExchangeError& error) {
    EXPECT_EQ(error.failure().cause, cause);
    EXPECT_EQ(error.failure().ranks, std::vector<int>{rank});
  }
}

TEST_F(MeshTest, WhoHasLeftIsMissedByThoseWhoGoOnAndNotBlamedForOneThatIsLate) {
  auto meshes = join_all<3>();
  meshes[0].reset();
  while (meshes[1]->gone({0}).empty()) std::this_thread::yield();
  expect_missed(*meshes[1], 2, CollectiveError::Cause::timeout, base::Deadline::in_seconds(0.05));
  expect_missed(*meshes[2], 0, CollectiveError::Cause::lost, soon());
}

TEST_F(MeshTest, WhoGivesUpEndsOnlyTheExchangesItHasNotCompleted) {
  auto meshes = join_all<2>();
  char sent = 'a', received = 0;
  meshes[0]->exchange({{Mesh::Send{1, &sent, 1}}}, {}, soon());
  meshes[0]->abandon({CollectiveError::Cause::lost, {0}});
  meshes[1]->exchange({}, {{Mesh::Receive{0, &received, 1}}}, soon());
  EXPECT_EQ(received, 'a');
  EXPECT_THROW(meshes[1]->exchange({}, {{Mesh::Receive{0, &received, 1}}}, soon()), ExchangeError);
}

TEST_F(MeshTest, WhoDiesBeforeOthersConnectToItIsNamed) {
  distributed::FileStore store(folder_ / "store", soon());
  store.set("mesh/came/0", Socket::listening(address).name());
  accelmgr::test::expect_error(CollectiveError::Cause::lost, {0}, [this] { join(1, 2); });
}

TEST_F(MeshTest, ConnectionsOfStrangersAreDropped) {
  auto joining = std::async(std::launch::async, [this] { return join(0, 2); });
  distributed::FileStore store(folder_ / "store", soon());
  const auto name = store.get("mesh/came/0", soon());
  const auto stranger = Socket::connected(name, soon());
  stranger.send(large.data(), large.size());
  const auto mesh = join(1, 2);
  char sent = 'a', received = 0;
  mesh->exchange({{Mesh::Send{0, &sent, 1}}}, {}, soon());
  joining.get()->exchange({}, {{Mesh::Receive{1, &received, 1}}}, soon());
  EXPECT_EQ(received, 'a');
}

}  // namespace
}  // namespace accelmgr::collective::tcp
