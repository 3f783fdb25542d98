#include "engine/data/source_position.hpp"

#include "engine/data/fixtures.hpp"

namespace accelmgr::data {
namespace {

using test::expect_contains;

const Identity identity{{"seed", 7}, {"bytes", 1220}};

std::string refused(const std::string& state, std::uint64_t epochs = 0) {
  return test::message_of<DataError>([&] { read_position(state, "text", identity, epochs); });
}

TEST(SourcePosition, IsReadableTextThatIsReadBack) {
  const SourcePosition at{.epoch = 3, .position = UINT64_MAX};
  const auto state = write_position("text", identity, at);
  EXPECT_EQ(state, "text seed=7 bytes=1220 epoch=3 position=18446744073709551615");
  EXPECT_EQ(read_position(state, "text", identity, 4), at);
}

TEST(SourcePosition, AnotherKindOrIdentityIsRefusedByName) {
  expect_contains(refused("tensors seed=7 bytes=1220 epoch=0 position=0"),
                  {"'tensors seed=7", "text source"});
  expect_contains(refused("text seed=8 bytes=1220 epoch=0 position=0"), {"seed is 8; here it is 7"});
  expect_contains(refused("text seed=7 bytes=1221 epoch=0 position=0"), {"bytes is 1221; here it is 1220"});
}

TEST(SourcePosition, AnythingElseIsRefusedWithWhatWasExpected) {
  for (const char* wrong : {"text", "text seed", "text seed=", "text seed=-7", "text seed=7x bytes=1220",
                            "text sed=7 bytes=1220 epoch=0 position=0", "text seed=99999999999999999999"})
    expect_contains(refused(wrong), {"expected seed=NUMBER"});
  expect_contains(refused("text seed=7 bytes=1220 epoch=0"), {"expected position=NUMBER, found ''"});
  for (const char* wrong :
       {"text seed=7 bytes=1220 epoch=0 position=0 ", "text  seed=7 bytes=1220 epoch=0 position=0",
        "text seed=07 bytes=1220 epoch=0 position=0", "text seed=7 bytes=1220 epoch=0 position=0 more"})
    expect_contains(refused(wrong), {"expected 'text seed=7 bytes=1220 epoch=0 position=0'"});
  expect_contains(refused(""), {"not that of a text source"});
  EXPECT_LT(refused(std::string(4000, '\xff')).size(), 400U);
}

TEST(SourcePosition, AnEpochOrPositionBeyondTheEndIsRefused) {
  EXPECT_EQ(read_position("text seed=7 bytes=1220 epoch=3 position=5", "text", identity, 0).epoch, 3U);
  expect_contains(refused("text seed=7 bytes=1220 epoch=3 position=5", 3), {"epoch 3", "3 epochs"});
  EXPECT_NO_THROW(check_position({.epoch = 0, .position = 5}, 5));
  expect_contains(test::message_of<DataError>([] { check_position({.epoch = 2, .position = 6}, 5); }),
                  {"6 elements of epoch 2", "has 5"});
}

}  // namespace
}  // namespace accelmgr::data
