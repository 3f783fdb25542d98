// Runs the tests. A test executes this program again as its manager.
#include <gtest/gtest.h>

#include "accelmgr/init.hpp"

int main(int argc, char** argv) {
  accelmgr::init(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
