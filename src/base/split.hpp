// Splits texts into lists.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace accelmgr::base {

inline std::string trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return "";
  return std::string(text.substr(first, text.find_last_not_of(" \t") - first + 1));
}

/// The parts between the separators; an empty text is one part.
inline std::vector<std::string_view> parts_of(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t start = 0;;) {
    const auto end = text.find(separator, start);
    parts.push_back(text.substr(start, end - start));
    if (end == std::string_view::npos) return parts;
    start = end + 1;
  }
}

/// These parts, trimmed. Empty parts are kept, but an empty text has no parts.
inline std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  if (trimmed(text).empty()) return parts;
  for (const auto part : parts_of(text, separator)) parts.push_back(trimmed(part));
  return parts;
}

}  // namespace accelmgr::base
