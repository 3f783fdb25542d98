// Runs the tests. A test executes this program again in a role, or as its manager.
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include <string_view>

#include "accelmgr/init.hpp"
#include "roles.hpp"

int main(int argc, char** argv) {
  using namespace accelmgr::test;
  if (argc >= 3 && std::string_view(argv[1]) == role_argument)
    return play(argv[2], {argv + 3, argv + argc}, argc, argv);
  accelmgr::init(argc, argv);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // Orphans become children of this process, where tests see them.
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
