// Runs the tests; started again by one of them, it is the manager of that test.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "accelmgr/init.hpp"

int main(int argc, char** argv) {
  accelmgr::init(argc, argv);
  at::set_num_threads(
      1);  // As many as the runners of the tests: what is compared is summed in the same order.
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
