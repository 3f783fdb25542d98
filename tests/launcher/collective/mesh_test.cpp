// Tests of gloo's Mesh: what the other members see when one has done its part and leaves, and that a message
// that has come is seen at once.
#include "launcher/collective/gloo/mesh.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <future>
#include <numeric>
#include <thread>

#include "launcher/collective/gloo/load.hpp"
#include "launcher/contract/collective/file_store.hpp"

namespace accelmgr::collective::gloo {
namespace {

constexpr double patience_s = 60;
constexpr const char* address = "127.0.0.1";

base::Deadline soon() { return base::Deadline::in_seconds(patience_s); }

class MeshTest : public testing::Test {
 protected:
  void SetUp() override {
    // Sanitizer builds have no gloo plug-in, nor do machines without libgloo: there is nothing to test then.
    if (const auto why_not = unavailable_because(); !why_not.empty()) GTEST_SKIP() << why_not;
  }
  /// Joins the mesh as `rank`. Blocks until all ranks have come.
  std::unique_ptr<Mesh> join(int rank, int size) {
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    contract::FileStore store(folder_.path());
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

  contract::TemporaryFolder folder_;
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
  const pid_t slow = fork();
  if (slow == 0) {
    alarm(60);
    try {
      _exit(takes_all(*join(1, 3)) ? 0 : 1);
    } catch (const ExchangeError&) {
      _exit(2);
    }
  }
  std::promise<void> stopped;
  std::jthread rank2([&] {
    const auto mesh = join(2, 3);
    char ready = 0;
    mesh->exchange({}, {{Mesh::Receive{1, &ready, 1}}}, soon());
    kill(slow, SIGSTOP);
    waitpid(slow, nullptr, WUNTRACED);
    stopped.set_value();
  });
  auto mesh = join(0, 3);
  stopped.get_future().wait();
  mesh->exchange({{Mesh::Send{1, large.data(), large.size()}}}, {}, soon());
  mesh.reset();
  rank2.join();
  kill(slow, SIGCONT);
  int status = 0;
  waitpid(slow, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << (WEXITSTATUS(status) == 2 ? "its call failed"
                                                                 : "it got something else");
}

TEST_F(MeshTest, WhoHasLeftIsNotBlamedForOneThatIsLate) {
  auto meshes = join_all<3>();
  meshes[0].reset();
  while (meshes[1]->gone({0}).empty()) std::this_thread::yield();
  char byte = 0;
  try {
    meshes[1]->exchange({}, {{Mesh::Receive{2, &byte, 1}}}, base::Deadline::in_seconds(0.05));
    ADD_FAILURE() << "rank 2 sent nothing";
  } catch (const ExchangeError& error) {
    EXPECT_EQ(error.failure().cause, CollectiveError::Cause::timeout);
    EXPECT_EQ(error.failure().ranks, std::vector<int>{2});
  }
}

TEST_F(MeshTest, WhoHasLeftIsMissedByThoseWhoGoOn) {
  auto meshes = join_all<2>();
  meshes[0].reset();
  char byte = 0;
  try {
    meshes[1]->exchange({}, {{Mesh::Receive{0, &byte, 1}}}, soon());
    ADD_FAILURE() << "rank 0 sent nothing";
  } catch (const ExchangeError& error) {
    EXPECT_EQ(error.failure().cause, CollectiveError::Cause::lost);
    EXPECT_EQ(error.failure().ranks, std::vector<int>{0});
  }
}

/// The two ends of a connection of the plug-in, without a Mesh.
class Ends {
 public:
  Ends() {
    PluginError error;
    for (int rank = 0; rank < 2; ++rank)
      meshes_[static_cast<std::size_t>(rank)] = plugin().create(address, rank, 2, patience_s, &error);
    if (sender() == nullptr || receiver() == nullptr) throw std::runtime_error(error.text);
    const auto connect = [](PluginMesh* mesh, int peer, PluginMesh* to) {
      PluginError why;
      std::size_t bytes = 0;
      const auto* addresses = plugin().addresses(to, &bytes);
      EXPECT_TRUE(plugin().connect(mesh, peer, addresses, bytes, &why)) << why.text;
    };
    const std::jthread other(connect, receiver(), 0, sender());
    connect(sender(), 1, receiver());
  }
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;
  ~Ends() {
    for (auto* mesh : meshes_)
      if (mesh != nullptr) plugin().free_mesh(mesh);
  }
  PluginMesh* sender() const { return meshes_[0]; }
  PluginMesh* receiver() const { return meshes_[1]; }

 private:
  std::array<PluginMesh*, 2> meshes_{};
};

/// While it lives, its thread is stopped for 0.1 ms again and again, at any instruction: like a thread that
/// loses its core to other threads.
class Stops {
 public:
  Stops() {
    struct sigaction action {};
    action.sa_handler = [](int) {
      const auto until = base::Deadline::at_ns(base::now_ns() + stop_ns);
      while (!until.passed()) {
      }
    };
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &action, &before_);
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGUSR1;
    event._sigev_un._tid = gettid();
    const timespec again{.tv_sec = 0, .tv_nsec = stop_ns + run_ns};
    const itimerspec times{.it_interval = again, .it_value = again};
    EXPECT_EQ(timer_create(CLOCK_MONOTONIC, &event, &timer_), 0);
    EXPECT_EQ(timer_settime(timer_, 0, &times, nullptr), 0);
  }
  Stops(const Stops&) = delete;
  Stops& operator=(const Stops&) = delete;
  ~Stops() {
    timer_delete(timer_);
    sigaction(SIGUSR1, &before_, nullptr);
  }

 private:
  static constexpr long stop_ns = 100'000;
  static constexpr long run_ns = 200'000;
  timer_t timer_{};
  struct sigaction before_ {};
};

TEST_F(MeshTest, AMessageThatIsThereIsSeenByAThreadThatIsStoppedNowAndThen) {
  const Ends ends;
  ASSERT_FALSE(HasFailure());
  const Stops stops;
  std::array<char, 500> bytes{};
  for (std::uint64_t slot = 0; slot < 20; ++slot) {
    PluginError error;
    std::vector<PluginMessage*> receipts, sent;
    for (auto& byte : bytes)
      receipts.push_back(plugin().begin(ends.receiver(), 0, slot, &byte, 1, false, &error));
    for (auto& byte : bytes) sent.push_back(plugin().begin(ends.sender(), 1, slot, &byte, 1, true, &error));
    // When the last message has come, all have.
    EXPECT_EQ(plugin().wait(receipts.back(), patience_s, &error), plugin_done);
    const auto unseen = std::count_if(receipts.begin(), receipts.end() - 1, [&](PluginMessage* receipt) {
      return plugin().wait(receipt, 0, &error) != plugin_done;
    });
    EXPECT_EQ(unseen, 0);
    for (auto* message : sent) plugin().free_message(message);
    for (auto* message : receipts) plugin().free_message(message);
  }
}

}  // namespace
}  // namespace accelmgr::collective::gloo
