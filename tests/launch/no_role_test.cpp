// A program that does not call accelmgr::init() is not executed again as something else.
#include "launch/machines.hpp"
#include "launch/spawner.hpp"
#include "message_of.hpp"

namespace accelmgr::launch {
namespace {

TEST(ProgramWithoutInit, CannotBeTheForkserver) {
  EXPECT_TRUE(
      says(test::message_of<UsageError>([] { Spawner::execute(); }),
           {"cannot be executed as the forkserver", "accelmgr::init() must be called first in main()"}));
}

TEST(ProgramWithoutInit, CannotBeAChildExecutedAnew) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer does not follow forks of processes with threads";
#endif
  auto spawner = Spawner::fork();
  const Task task{.rank = 0,
                  .environment = {},
                  .program = {},
                  .call = make_call("function", "", Value::array()),
                  .execute_self = true};
  EXPECT_TRUE(says(test::message_of<UsageError>([&] { spawner.start(0, task); }),
                   {"cannot be executed as a child", "accelmgr::init() must be called first in main()"}));
}

}  // namespace
}  // namespace accelmgr::launch
