// Runs the tests, or torture rounds for as long as the arguments say. A test executes this program again as
// the killer, as the manager or as a service.
#include "role_process.hpp"
#include "torture_rounds.hpp"

int main(int argc, char** argv) {
  using namespace accelmgr::test;
  return run_tests(
      argc, argv,
      {{rounds_argument, torture_in_rounds}, {service_rounds_argument, service_torture_in_rounds}});
}
