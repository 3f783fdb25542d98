#include "base/helper_threads.hpp"

#include <gtest/gtest.h>
#include <signal.h>

#include <array>

namespace accelmgr::base {
namespace {

TEST(Helpers, ShareOutEachIndexOnceAndWhatTheyWroteIsThereAfterwards) {
  for (const int threads : {1, 2, 5}) {
    Helpers helpers(threads);
    for (int round = 0; round < 200; ++round) {
      std::array<int, 40> calls{};
      const int count = round % int(calls.size() + 1);
      helpers.for_each(count, [&](int i) { ++calls.at(static_cast<std::size_t>(i)); });
      for (int i = 0; i < int(calls.size()); ++i)
        ASSERT_EQ(calls.at(static_cast<std::size_t>(i)), i < count ? 1 : 0) << threads << " " << round;
    }
  }
}

TEST(Helpers, WorkAtTheSameTime) {
  Helpers helpers(3);
  std::atomic<int> here{0};
  helpers.for_each(3, [&](int) {
    ++here;
    while (here < 3) std::this_thread::yield();
  });
  EXPECT_EQ(here, 3);
}

TEST(Helpers, HandleNoSignals) {
  Helpers helpers(2);
  std::atomic<int> here{0}, blocking{0};
  helpers.for_each(2, [&](int) {
    ++here;
    while (here < 2) std::this_thread::yield();  // Each thread has one.
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    blocking += sigismember(&blocked, SIGTERM);
  });
  EXPECT_EQ(blocking, 1);
}

}  // namespace
}  // namespace accelmgr::base
