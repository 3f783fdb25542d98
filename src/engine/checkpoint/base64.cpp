#include "engine/checkpoint/base64.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "accelmgr/errors.hpp"

namespace accelmgr::checkpoint {
namespace {

constexpr std::string_view alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

std::uint32_t value_of(char digit, std::size_t at) {
  const auto value = alphabet.find(digit);
  if (value == std::string_view::npos)
    throw CheckpointError(
        fmt::format("not base64: byte {} of the text is {:#04x}, which is not a base64 digit", at,
                    static_cast<unsigned char>(digit)));
  return static_cast<std::uint32_t>(value);
}

}  // namespace

std::string encode_base64(std::span<const std::byte> bytes) {
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    const auto count = std::min<std::size_t>(3, bytes.size() - at);
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < 3; ++i)
      bits = bits << 8 | (i < count ? std::to_integer<std::uint32_t>(bytes[at + i]) : 0);
    for (std::size_t i = 0; i < 4; ++i) text += i <= count ? alphabet[bits >> (18 - 6 * i) & 63] : '=';
  }
  return text;
}

std::vector<std::byte> decode_base64(std::string_view text) {
  if (text.size() % 4 != 0)
    throw CheckpointError(
        fmt::format("not base64: its length is {}; it must be a multiple of 4", text.size()));
  const std::size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  std::vector<std::byte> bytes;
  bytes.reserve(text.size() / 4 * 3);
  for (std::size_t at = 0; at < text.size(); at += 4) {
    const auto digits = at + 4 == text.size() ? 4 - padding : 4;
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < 4; ++i) bits = bits << 6 | (i < digits ? value_of(text[at + i], at + i) : 0);
    for (std::size_t i = 0; i + 1 < digits; ++i) bytes.push_back(std::byte(bits >> (16 - 8 * i) & 255));
    if ((bits & ((1u << 8 * (4 - digits)) - 1)) != 0)
      throw CheckpointError("not base64: the unused bits of its last digit are not zero");
  }
  return bytes;
}

}  // namespace accelmgr::checkpoint
