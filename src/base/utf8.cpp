#include "base/utf8.hpp"

#include <cstddef>

namespace accelmgr::base {
namespace {

constexpr std::string_view replacement = "\xEF\xBF\xBD";

/// Length in bytes of the character with which `text` begins; 0 if that is not UTF-8. By table 3-7 of the
/// Unicode standard: the range of the second byte excludes overlong forms, surrogates and values beyond
/// U+10FFFF.
std::size_t character_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) -> unsigned {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const auto lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  const std::size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  const unsigned lowest = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned highest = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (byte(1) < lowest || byte(1) > highest) return 0;
  for (std::size_t i = 2; i < length; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  return length;
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string out;
  bool in_torn_run = false;
  while (!text.empty()) {
    const auto length = character_bytes(text);
    if (length > 0) {
      out += text.substr(0, length);
    } else if (!in_torn_run) {
      out += replacement;
    }
    in_torn_run = length == 0;
    text.remove_prefix(length > 0 ? length : 1);
  }
  return out;
}

}  // namespace accelmgr::base
