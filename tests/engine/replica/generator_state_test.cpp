#include "engine/replica/generator_state.hpp"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "accelmgr/errors.hpp"

namespace accelmgr::replica {
namespace {

TEST(GeneratorState, ComesBackAsLongAsItWas) {
  alignas(8) std::array<std::byte, 32> memory{};
  EXPECT_TRUE(stored_generator(memory).empty());
  const std::vector<std::byte> state{std::byte{1}, std::byte{2}, std::byte{3}};
  store_generator(state, memory);
  const auto back = stored_generator(memory);
  EXPECT_EQ(std::vector<std::byte>(back.begin(), back.end()), state);
}

TEST(GeneratorState, AsMuchAsThereIsRoomForAndNoMore) {
  alignas(8) std::array<std::byte, 32> memory{};
  EXPECT_NO_THROW(store_generator(std::vector<std::byte>(24), memory));
  EXPECT_THROW(store_generator(std::vector<std::byte>(25), memory), ModelError);
  memory[0] = std::byte{25};
  EXPECT_THROW(stored_generator(memory), ModelError);
}

}  // namespace
}  // namespace accelmgr::replica
