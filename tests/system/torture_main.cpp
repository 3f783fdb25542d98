// Runs the test, or torture rounds for as long as the arguments say. The test executes this program again as
// the killer or as the manager.
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include <string_view>

#include "accelmgr/init.hpp"
#include "killer.hpp"
#include "roles.hpp"
#include "torture_rounds.hpp"

int main(int argc, char** argv) {
  using namespace accelmgr::test;
  if (argc == 4 && std::string_view(argv[1]) == role_argument && std::string_view(argv[2]) == kills_at_random)
    return play_killer(argv[3]);
  accelmgr::init(argc, argv);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // Orphans become children of this process, where tests see them.
  if (argc == 5 && std::string_view(argv[1]) == rounds_argument)
    return torture_in_rounds({argv + 2, argv + argc});
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
