#include "base/refusals.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace accelmgr::base {
namespace {

TEST(Refusals, AFloodOfThemFillsNoLog) {
  Refusals refusals;
  testing::internal::CaptureStderr();
  for (int i = 0; i < 100'000; ++i) refusals.note("a test");
  const auto logged = testing::internal::GetCapturedStderr();
  EXPECT_NE(logged.find("refused a message (1 so far): a test"), std::string::npos) << logged;
  EXPECT_NE(logged.find("refused a message (65536 so far)"), std::string::npos) << logged;
  EXPECT_EQ(std::count(logged.begin(), logged.end(), '\n'), 17) << logged;
}

}  // namespace
}  // namespace accelmgr::base
