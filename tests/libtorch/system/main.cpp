// Runs the tests. A test executes this program again as its manager.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include "accelmgr/init.hpp"

int main(int argc, char** argv) {
  accelmgr::init(argc, argv);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // Orphans become children of this process, where tests see them.
  at::set_num_threads(
      1);  // As many threads as the runners of the tests have, so that sums run in the same order.
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
