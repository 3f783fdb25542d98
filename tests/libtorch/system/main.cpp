// Runs the tests. A test executes this program again as its manager.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "accelmgr/init.hpp"

int main(int argc, char** argv) {
  accelmgr::init(argc, argv);
  at::set_num_threads(
      1);  // As many threads as the runners of the tests have, so that sums run in the same order.
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
