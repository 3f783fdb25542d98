// Runs the tests. A test executes this program again as a host that will be killed, as a host that calls
// init() too late, or as the manager of either.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <latch>
#include <string_view>
#include <thread>

#include "accelmgr/init.hpp"
#include "resume_roles.hpp"
#include "stage.hpp"
#include "training.hpp"

namespace accelmgr::test {
namespace {

int host(int argc, char** argv) {
  init(argc, argv);
  Training training(resumable_config(argv[3], argv[4]));
  training.train(3);
  training.kill_runner(1);
  training.train(5);
  say(training.save());
  wait_for_test();
  training.train(12);
  return 0;
}

int init_with_threads(int argc, char** argv) {
  std::latch end(1);
  std::jthread first([&] { end.wait(); }), second([&] { end.wait(); });
  int code = 1;
  try {
    init(argc, argv);
  } catch (const UsageError& error) {
    say(error.what());
    code = 0;
  }
  end.count_down();
  return code;
}

}  // namespace
}  // namespace accelmgr::test

int main(int argc, char** argv) {
  using namespace accelmgr::test;
  const std::string_view role = argc >= 3 && argv[1] == std::string_view(role_argument) ? argv[2] : "";
  if (role == role_host) return host(argc, argv);
  if (role == role_inits_with_threads) return init_with_threads(argc, argv);
  accelmgr::init(argc, argv);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // Orphans become children of this process, where tests see them.
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
