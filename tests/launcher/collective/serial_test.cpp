#include "launcher/collective/serial.hpp"

#include <gtest/gtest.h>

#include "message_of.hpp"

namespace accelmgr::collective {
namespace {

using accelmgr::test::message_of;

TEST(Serial, HasNobodyToTalkTo) {
  const auto serial = make_serial();
  const auto says = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  says(message_of<UsageError>([&] { serial->broadcast_object("", 1); }),
       "root 1 is not within 0 to 0, the ranks of this communicator");
  const int other[] = {1};
  says(message_of<UsageError>([&] { serial->group(other); }),
       "the ranks of a group are [1]; they must be [0]");
}

TEST(Serial, MakesGroupsOfItself) {
  const int alone[] = {0};
  EXPECT_EQ(make_serial()->group(alone)->ranks(), std::vector<int>{0});
}

}  // namespace
}  // namespace accelmgr::collective
