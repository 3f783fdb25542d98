// Runs the tests, or, executed again by spawn(), becomes a child or the forkserver.
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include "functions.hpp"
#include "launch/spawner.hpp"

int main(int argc, char** argv) {
  accelmgr::launch::test::register_functions();
  accelmgr::launch::take_role(argc, argv);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // Orphans become ours: a test can see that it leaves none.
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
