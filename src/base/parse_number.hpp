// Parses numbers.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>

namespace accelmgr::base {

/// nullopt unless the whole text is a number in the range of T.
template <class T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace accelmgr::base
