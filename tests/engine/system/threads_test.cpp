// Tests of a host with threads: it may have other threads and start a manager from any thread, but have none
// before init().
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <latch>
#include <thread>

#include "resume_roles.hpp"
#include "staged_run.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

TEST(Threads, OfTheHostAreNoMatterToAStart) {
  std::latch end(1);
  std::jthread first([&] { end.wait(); }), second([&] { end.wait(); });
  {
    Stage stage;
    StagedRun run(stage);
    expect_ok(run.manager());
  }
  end.count_down();
}

// A manager must not depend on the thread that started it, as with a parent-death signal.
TEST(Threads, MayStartAManagerAndEnd) {
  Stage stage;
  std::unique_ptr<StagedRun> run;
  std::thread([&] { run = std::make_unique<StagedRun>(stage); }).join();
  expect_ok(run->manager());
  std::thread([&] { expect_ok(run->manager()); }).join();
}

TEST(Threads, BeforeInitAreRefusedWithTheirNumber) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  base::UniqueFd out(ends[0]), in(ends[1]);
  const std::pair<int, int> fds[] = {{in.get(), role_says}};
  const auto child = ipc::execute_self({role_inits_with_threads}, fds);
  in.reset();
  char text[512] = {};
  EXPECT_GT(read(out.get(), text, sizeof text - 1), 0);
  expect_contains(text, {"accelmgr::init()", "3 threads", "first in main()"});
  int status = -1;
  EXPECT_EQ(waitpid(child.pid, &status, 0), child.pid);
  EXPECT_EQ(ipc::describe_exit(status), "exit code 0");
  expect_nothing_left();
}

}  // namespace
}  // namespace accelmgr::test
