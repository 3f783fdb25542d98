// Runs the tests, or torture rounds for as long as the arguments say. A test executes this program again as
// the killer, as the manager or as a service.
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include <string_view>

#include "accelmgr/init.hpp"
#include "killer.hpp"
#include "roles.hpp"
#include "service_run.hpp"
#include "torture_rounds.hpp"

int main(int argc, char** argv) {
  using namespace accelmgr::test;
  if (argc == 4 && std::string_view(argv[1]) == role_argument && std::string_view(argv[2]) == kills_at_random)
    return play_killer(argv[3]);
  if (argc >= 3 && std::string_view(argv[1]) == role_argument)
    return play_service(argv[2], {argv + 3, argv + argc}, argc, argv);
  accelmgr::init(argc, argv);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // Orphans become children of this process, where tests see them.
  if (argc == 5 && std::string_view(argv[1]) == rounds_argument)
    return torture_in_rounds({argv + 2, argv + argc});
  if (argc == 5 && std::string_view(argv[1]) == service_rounds_argument)
    return service_torture_in_rounds({argv + 2, argv + argc});
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
