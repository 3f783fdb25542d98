// Tests of what a handle refuses before it starts any process.
#include "engine/client/handle.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelmgr/errors.hpp"
#include "accelmgr/init.hpp"
#include "base/ipc/process.hpp"
#include "message_of.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::client {
namespace {

using test::message_of;
using testing::HasSubstr;

struct HandleTest : testing::Test {
  test::TemporaryFolder folder;
  ~HandleTest() override { EXPECT_TRUE(ipc::children().empty()); }
};

TEST_F(HandleTest, AConfigurationThatCannotBeMeantIsRefused) {
  const Config config{.nprocs = 1, .model = {.kind = ""}};
  EXPECT_THAT(message_of<ConfigError>([&] { Handle(config, {}); }), HasSubstr("model.kind is empty"));
}

TEST_F(HandleTest, ACheckpointThatIsNotThereIsNamed) {
  const Config config{.checkpoint = {.resume = folder / "step-00000007"}};
  EXPECT_THAT(message_of<CheckpointError>([&] { Handle(config, {}); }), HasSubstr("step-00000007"));
}

TEST_F(HandleTest, ADirectoryThatIsAFileIsNotLocked) {
  const auto file = folder.write("file", "text");
  const Config config{.checkpoint = {.directory = file}};
  EXPECT_THAT(message_of<CheckpointError>([&] { Handle(config, {.lock_checkpoints = true}); }),
              HasSubstr(file));
}

}  // namespace
}  // namespace accelmgr::client

int main(int argc, char** argv) {
  accelmgr::init(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
