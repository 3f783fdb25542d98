// main() of tests whose ranks are this program, forked or executed again.
#include <gtest/gtest.h>

#include "launch/run/spawner.hpp"

int main(int argc, char** argv) {
  accelmgr::launch::take_role(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
