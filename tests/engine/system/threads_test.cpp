// Tests of a host with threads: it may have other threads and start a manager from any thread, but have none
// before init().
#include <gtest/gtest.h>

#include <latch>
#include <thread>

#include "accelmgr/init.hpp"
#include "role_process.hpp"
#include "staged_run.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

/// Calls init() while two more threads run, and says the exception's text.
constexpr const char* inits_with_threads = "inits with threads";
const RegisteredRole late(inits_with_threads, [](const Arguments&, int argc, char** argv) {
  std::latch end(1);
  std::jthread first([&] { end.wait(); }), second([&] { end.wait(); });
  say(message_of<UsageError>([&] { init(argc, argv); }));
  end.count_down();
  return 0;
});

// A manager must not depend on the thread that started it, as with a parent-death signal.
TEST(Threads, OfTheHostMayStartAManagerBesideOthersAndEnd) {
  std::latch end(1);
  std::jthread first([&] { end.wait(); }), second([&] { end.wait(); });
  {
    Stage stage;
    std::unique_ptr<StagedRun> run;
    std::thread([&] { run = std::make_unique<StagedRun>(stage); }).join();
    expect_ok(run->manager());
    std::thread([&] { expect_ok(run->manager()); }).join();
  }
  end.count_down();
}

TEST(Threads, BeforeInitAreRefusedWithTheirNumber) {
  RoleProcess child(inits_with_threads, {});
  expect_contains(child.line(), {"accelmgr::init()", "3 threads", "first in main()"});
  EXPECT_EQ(ipc::describe_exit(child.status()), "exit code 0");
  expect_nothing_left();
}

}  // namespace
}  // namespace accelmgr::test
