#include "engine/manager/source_watch.hpp"

#include <gtest/gtest.h>

#include "engine/session/attempt.hpp"

namespace accelmgr::manager {
namespace {

constexpr std::int64_t watched_second_ns = 1'000'000'000;
constexpr std::int64_t begin_ns = 1000 * watched_second_ns;

/// A session of two ranks with an open attempt, in which rank 1 waits for data.
class SourceWatchTest : public testing::Test {
 protected:
  SourceWatchTest() {
    session::open_attempt(session_, {.participants = 3});
    session_.record(0).phase.store(session::Phase::forward);
    session_.record(1).phase.store(session::Phase::data);
  }
  /// What the watch says when a read that began at `since_ns` has taken `seconds`.
  std::optional<std::string> after(double seconds, std::int64_t since_ns = begin_ns) {
    return watch_.look(data::Reading{"next()", 17, since_ns},
                       since_ns + static_cast<std::int64_t>(seconds * double(watched_second_ns)));
  }

  session::Session session_ =
      session::Session::create({.ranks = 2, .bytes = {.parameters = 64}, .tensors = 1}, 2, 1);
  SourceWatch watch_{session_, "camera"};
};

TEST_F(SourceWatchTest, SaysWhatHasNotReturnedAndWhoWaitsForIt) {
  EXPECT_EQ(after(4.9), std::nullopt);
  EXPECT_EQ(
      after(5.1),
      "the data source 'camera' has not returned from next() for 5 s (element 17); waiting for it: rank 1");
}

TEST_F(SourceWatchTest, SaysItOnceOfEachWait) {
  EXPECT_TRUE(after(5));
  EXPECT_EQ(after(6), std::nullopt);
  EXPECT_EQ(after(600), std::nullopt);
  EXPECT_TRUE(after(5, begin_ns + 700 * watched_second_ns)) << "another read";
}

TEST_F(SourceWatchTest, SaysNothingWhereNoRankWaitsOrNothingIsRead) {
  EXPECT_EQ(watch_.look(std::nullopt, begin_ns + 60 * watched_second_ns), std::nullopt);
  session_.record(1).phase.store(session::Phase::backward);
  EXPECT_EQ(after(60), std::nullopt);
  session_.record(1).phase.store(session::Phase::data);
  session::abort_attempt(session_, 1, session::author_host);
  EXPECT_EQ(after(60), std::nullopt) << "the attempt is over";
}

}  // namespace
}  // namespace accelmgr::manager
