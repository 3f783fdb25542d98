// main() of tests whose ranks are this program, forked or executed again.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "base/ipc/roles.hpp"

int main(int argc, char** argv) {
  accelmgr::ipc::take_role(argc, argv);
  at::set_num_threads(1);  // A forked process has only one thread.
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
