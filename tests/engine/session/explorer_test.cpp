#include "explorer.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace accelmgr::session {
namespace {

// A model with two counters. Each step advances one of them, up to `limit`.
struct Counters {
  struct State {
    std::uint32_t a, b;
  };
  std::uint32_t limit = 3;
  std::uint32_t wrong_sum = ~0u;
  bool wraps = false;

  State initial() const { return {0, 0}; }
  void steps(const State& s, Steps<State>& out) const {
    if (s.a < limit) ++out.add(s, "a", "counts").a;
    if (s.b < limit) ++out.add(s, "b", "counts").b;
    if (wraps && s.b == limit) out.add(s, "b", "wraps").b = 0;
    if (s.a > 0 && !may_rest(s)) out.add(s, "-", "breaks", true) = {limit, limit};
  }
  const char* wrong(const State& s) const { return s.a + s.b == wrong_sum ? "the sum" : nullptr; }
  bool may_rest(const State& s) const { return s.a == limit && s.b == limit; }
  std::string text(const State& s) const { return fmt::format("{},{}", s.a, s.b); }
};

TEST(Explorer, VisitsEveryStateOnce) {
  const Counters counters;
  const auto found = Explorer(counters).explore(100);
  EXPECT_EQ(found.broken, "");
  EXPECT_EQ(found.states, 16u);
}

TEST(Explorer, TellsTheShortestWayToAWrongState) {
  const Counters counters{.wrong_sum = 2};
  const auto found = Explorer(counters).explore(100);
  EXPECT_EQ(found.broken, "the sum");
  EXPECT_EQ(std::count(found.trace.begin(), found.trace.end(), '\n'), 3) << found.trace;
}

TEST(Explorer, FindsACircle) {
  const Counters counters{.wraps = true};
  EXPECT_TRUE(Explorer(counters).explore(100).broken.starts_with("never stuck: the steps go round"));
}

TEST(Explorer, RefusesMoreStatesThanItMayHold) {
  const Counters counters;
  EXPECT_THROW(Explorer(counters).explore(10), std::length_error);
}

}  // namespace
}  // namespace accelmgr::session
