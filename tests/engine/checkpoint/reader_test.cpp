// Checks that a reader finds only whole checkpoints while another thread writes them.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "engine/checkpoint/checkpoint.hpp"
#include "support.hpp"

namespace accelmgr::checkpoint::test {
namespace {

constexpr int writes = 40;
constexpr int reads = 40;

/// Calls `write_one` and `read_one` in two threads, again and again, until both have been called often
/// enough.
template <typename Write, typename Read>
void do_at_once(Write write_one, Read read_one) {
  std::atomic<int> written{0}, read{0};
  const auto is_done = [&] { return (written >= writes && read >= reads) || ::testing::Test::HasFailure(); };
  const auto repeat = [&](auto& call, std::atomic<int>& count) {
    try {
      for (; !is_done(); ++count) call(count.load());
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  };
  std::thread reader([&] { repeat(read_one, read); });
  repeat(write_one, written);
  reader.join();
}

TEST(Reader, OfTheLatestNeverSeesHalfACheckpoint) {
  const TemporaryFolder directory;
  write_sample(directory.path(), 0);
  std::uint64_t last = 0;
  do_at_once([&](int i) { write_sample(directory.path(), static_cast<std::uint64_t>(i) + 1, {}, 0, 1); },
             [&](int) {
               const auto checkpoint = open_latest(
                   directory.path(), [](const auto&, const std::string& reason) { ADD_FAILURE() << reason; });
               EXPECT_GE(checkpoint.step, last);
               last = checkpoint.step;
               EXPECT_TRUE(is_sample(checkpoint, last));
             });
}

TEST(Reader, OfAStepThatIsReplacedSeesOneRunOrTheOther) {
  const TemporaryFolder directory;
  const auto path = write_sample(directory.path(), 5).path;
  do_at_once([&](int i) { write_sample(directory.path(), 5, {}, static_cast<float>(i)); },
             [&](int) {
               const auto checkpoint = open(path);
               EXPECT_TRUE(is_sample(checkpoint, 5, checkpoint.state.at("run").get<float>()));
             });
}

}  // namespace
}  // namespace accelmgr::checkpoint::test
