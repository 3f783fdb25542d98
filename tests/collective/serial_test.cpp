#include "collective/serial.hpp"

#include <gtest/gtest.h>

#include "message_of.hpp"

namespace accelmgr::collective {
namespace {

using accelmgr::test::message_of;

TEST(Serial, HasNobodyToTalkTo) {
  const auto serial = make_serial();
  message_of<UsageError>([&] { serial->send("", 0); });
  message_of<UsageError>([&] { serial->receive(0); });
  message_of<UsageError>([&] { serial->broadcast_object("", 1); });
  const int other[] = {1};
  message_of<UsageError>([&] { serial->group(other); });
}

TEST(Serial, MakesGroupsOfItself) {
  const int alone[] = {0};
  EXPECT_EQ(make_serial()->group(alone)->ranks(), std::vector<int>{0});
}

}  // namespace
}  // namespace accelmgr::collective
