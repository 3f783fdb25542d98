// The main() of this program does not call accelmgr::init().
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelmgr/errors.hpp"
#include "engine/client/handle.hpp"
#include "message_of.hpp"

namespace accelmgr::client {
namespace {

TEST(Handle, OfAProgramThatDidNotCallInitIsRefused) {
  EXPECT_THAT(test::message_of<UsageError>([] { Handle(Config{}, {}); }),
              testing::HasSubstr("call accelmgr::init(argc, argv) first in main()"));
}

}  // namespace
}  // namespace accelmgr::client
