#include "engine/checkpoint/base64.hpp"

#include <gtest/gtest.h>

#include <span>
#include <string>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"

namespace accelmgr::checkpoint::test {
namespace {

using accelmgr::test::message_of;

std::string encode(const std::string& text) { return encode_base64(std::as_bytes(std::span(text))); }

std::string decode(const std::string& text) {
  const auto bytes = decode_base64(text);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The vectors of RFC 4648, section 10.
TEST(Base64, IsThatOfTheStandard) {
  EXPECT_EQ(encode(""), "");
  EXPECT_EQ(encode("f"), "Zg==");
  EXPECT_EQ(encode("fo"), "Zm8=");
  EXPECT_EQ(encode("foo"), "Zm9v");
  EXPECT_EQ(encode("foob"), "Zm9vYg==");
  EXPECT_EQ(encode("fooba"), "Zm9vYmE=");
  EXPECT_EQ(encode("foobar"), "Zm9vYmFy");
}

TEST(Base64, GivesBackAnyBytes) {
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  for (std::size_t length = 0; length <= all.size(); ++length) {
    const auto rising = all.substr(0, length);
    const std::string falling(rising.rbegin(), rising.rend());
    EXPECT_EQ(decode(encode(rising)), rising);
    EXPECT_EQ(decode(encode(falling)), falling);
  }
}

TEST(Base64, RefusesWhatItDoesNotWrite) {
  const auto refusal = [](const std::string& text) {
    return message_of<CheckpointError>([&] { decode_base64(text); });
  };
  EXPECT_NE(refusal("Zm9").find("its length is 3; it must be a multiple of 4"), std::string::npos);
  EXPECT_NE(refusal("Zm9vY*==").find("byte 5"), std::string::npos);
  EXPECT_NE(refusal("Zg==Zg==").find("byte 2"), std::string::npos);
  EXPECT_NE(refusal("Z===").find("byte 1"), std::string::npos);
  EXPECT_NE(refusal("Zh==").find("unused bits"), std::string::npos);
  EXPECT_NE(refusal(std::string("Zm9\0", 4)).find("byte 3 of the text is 0x00"), std::string::npos);
}

}  // namespace
}  // namespace accelmgr::checkpoint::test
