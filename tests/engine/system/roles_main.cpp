// Runs the tests. A test executes this program again in a role, or as its manager.
#include "role_process.hpp"

int main(int argc, char** argv) { return accelmgr::test::run_tests(argc, argv); }
