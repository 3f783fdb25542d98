// Runs the tests with a fake of NVIDIA's driver: executes this program again with its folder in
// LD_LIBRARY_PATH, which the dynamic linker reads when a program begins.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <string>

#include "accelmgr/init.hpp"
#include "places.hpp"

int main(int argc, char** argv) {
  const auto driver = accelmgr::test::built("tests/engine/support/fake_driver");
  const char* path = getenv("LD_LIBRARY_PATH");
  if (path == nullptr || path != driver) {
    setenv("LD_LIBRARY_PATH", driver.c_str(), 1);
    setenv("FAKE_DRIVER_MACHINE", std::to_string(getpid()).c_str(),
           1);  // Managers claim the GPUs of a machine.
    execv("/proc/self/exe", argv);
    return 1;
  }
  accelmgr::init(argc, argv);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // Orphans become children of this process, where tests see them.
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
