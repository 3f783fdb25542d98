// Runs the tests of the contract. When a test executes this program again, it is a rank instead.
#include <gtest/gtest.h>

#include <string_view>

#include "world.hpp"

int main(int argc, char** argv) {
  using namespace accelmgr::collective::contract;
  if (argc > 1 && std::string_view(argv[1]) == role_argument) return play_rank({argv + 2, argv + argc});
  register_tests();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
