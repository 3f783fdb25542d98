// Runs the tests of ipc. When a test executes this program again, it plays a role instead (roles.hpp).
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include <string_view>

#include "executed_roles.hpp"

int main(int argc, char** argv) {
  using namespace accelmgr::ipc::test;
  if (argc == 3 && std::string_view(argv[1]) == role_argument) return play(argv[2]);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // Orphans become its children: a test can see that it leaves none.
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
