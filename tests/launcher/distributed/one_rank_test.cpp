#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <new>
#include <stdexcept>

#include "accelmgr/distributed_context.hpp"
#include "base/log.hpp"
#include "base/log_tail.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace accelmgr::distributed {
namespace {

using test::expect_on_ranks;
using test::message_of;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;

TEST(OneRankOnly, CallsItOnThatRank) {
  expect_on_ranks(3, [](int rank) {
    const auto twice = one_rank_only([](int number) { return 2 * number; }, 1);
    EXPECT_EQ(twice(4), rank == 1 ? std::optional(8) : std::nullopt);
    bool called = false;
    one_rank_only([&called] { called = true; })();
    EXPECT_EQ(called, rank == 0);
  });
}

/// A number that all ranks see.
class Shared {
 public:
  Shared()
      : page_(mmap(nullptr, sizeof(Number), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)),
        number_(new (page_) Number(0)) {}
  ~Shared() { munmap(page_, sizeof(Number)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  std::atomic<int>& operator*() const { return *number_; }

 private:
  using Number = std::atomic<int>;
  void* page_;
  Number* number_;
};

constexpr int rounds = 30;

TEST(OneRankOnly, WithABarrierTheOthersWaitForIt) {
  const Shared done;
  expect_on_ranks(3, [&](int) {
    for (int round = 1; round <= rounds; ++round) {
      one_rank_only([&] { *done = round; }, 2, /*with_barrier=*/true)();
      EXPECT_EQ(*done, round);
      barrier();
    }
  });
}

TEST(OneRankFirst, TheOthersComeAfterIt) {
  const Shared done;
  expect_on_ranks(3, [&](int rank) {
    for (int round = 1; round <= rounds; ++round) {
      const int first = round % 3;
      {
        const auto turn = one_rank_first(first, /*local=*/round % 2 == 0);
        if (rank == first) *done = round;
        EXPECT_EQ(*done, round);
      }
      barrier();
    }
  });
}

TEST(OneRankFirst, AnExceptionInsideLetsTheOthersGoOn) {
  expect_on_ranks(3, [](int rank) {
    const auto run = [rank] {
      const auto turn = one_rank_first(1);
      if (rank == 1) throw std::runtime_error("no data");
    };
    if (rank == 1)
      EXPECT_EQ(message_of<std::runtime_error>(run), "no data");
    else
      run();
    EXPECT_EQ(all_reduce(1.0), 3.0);
  });
}

TEST(OneRankFirst, AnExceptionInsideIsNotHiddenByOthersThatAreLost) {
  expect_on_ranks(2, [](int rank) {
    barrier();
    if (rank == 0) return;
    std::array<char, 4096> text{};
    std::atomic<std::uint64_t> written{0};
    base::keep_log_tail(text, written);
    EXPECT_EQ(message_of<std::runtime_error>([] {
                const auto turn = one_rank_first(1);
                throw std::runtime_error("no data");
              }),
              "no data");
    const auto lines = base::log_lines(text, written.load(), 100);
    base::drop_log_tail();
    EXPECT_THAT(lines, Contains(AllOf(HasSubstr("one_rank_first: the other ranks could not be released: "),
                                      HasSubstr("rank 0"))));
  });
}

TEST(OneRankFirst, ARankOutOfRangeIsNamedWithTheRange) {
  expect_on_ranks(2, [](int) {
    EXPECT_EQ(message_of<ConfigError>([] { const auto turn = one_rank_first(2); }),
              "rank should be between 0 and 1, but given 2");
    EXPECT_THROW(static_cast<void>(one_rank_first(-1, /*local=*/true)), ConfigError);
  });
}

}  // namespace
}  // namespace accelmgr::distributed
