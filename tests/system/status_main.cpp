// Runs the tests; executed again by one of them, it plays a role, or is the manager of that test.
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
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // Orphans become ours: a test can see that it leaves none.
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
