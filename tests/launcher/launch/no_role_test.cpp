// Tests of a program that does not call accelmgr::init(): spawn() must not execute it again in another role.
#include "launcher/launch/nodes.hpp"
#include "launcher/launch/run/spawner.hpp"
#include "message_of.hpp"

namespace accelmgr::launch {
namespace {

TEST(ProgramWithoutInit, CannotBeTheZygote) {
  EXPECT_TRUE(
      says(test::message_of<UsageError>([] { Spawner::from_zygote(); }),
           {"cannot be executed as the forkserver", "accelmgr::init() must be called first in main()"}));
}

TEST(ProgramWithoutInit, CannotBeAChildExecutedAnew) {
  auto spawner = Spawner::fork();
  const Task task{.rank = 0,
                  .environment = {},
                  .program = {},
                  .call = make_call("function", "", Value::array()),
                  .execute_self = true};
  EXPECT_TRUE(says(test::message_of<UsageError>([&] { spawner.start(0, task); }), {"executed as a child"}));
}

}  // namespace
}  // namespace accelmgr::launch
