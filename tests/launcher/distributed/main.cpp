// main() of tests whose ranks are this program, forked or executed again.
#include <gtest/gtest.h>

#include "base/ipc/roles.hpp"

int main(int argc, char** argv) {
  accelmgr::ipc::take_role(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
