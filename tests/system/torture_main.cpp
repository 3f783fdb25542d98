// Runs the test, or the same for as long as it is told; executed again by it, it is who kills, or the
// manager.
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
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // Orphans become ours: the test can see that it leaves none.
  if (argc == 5 && std::string_view(argv[1]) == rounds_argument)
    return torture_in_rounds({argv + 2, argv + argc});
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
