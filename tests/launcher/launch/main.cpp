// Runs the tests. spawn() executes this program again as a child or as the zygote.
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include "base/ipc/roles.hpp"
#include "functions.hpp"

int main(int argc, char** argv) {
  accelmgr::launch::test::register_functions();
  accelmgr::ipc::take_role(argc, argv);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // Orphans become children of this process, where tests see them.
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
