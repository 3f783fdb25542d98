// Reading files of /proc and /sys, whose size is known only when they have been read.
#pragma once

#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

namespace accelmgr::ipc {

/// The whole file; nullopt if it cannot be read, because there is no such file, process or control group.
inline std::optional<std::string> read_proc(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file.is_open()) return std::nullopt;
  try {
    return std::string{std::istreambuf_iterator<char>(file), {}};
  } catch (const std::ios_base::failure&) {
    return std::nullopt;  // The process ended between opening and reading.
  }
}

/// The number that `text` begins with, after blanks; nullopt for anything else ("max").
inline std::optional<std::uint64_t> leading_number(std::string_view text) {
  const auto digit = text.find_first_not_of(" \t");
  if (digit == std::string_view::npos) return std::nullopt;
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data() + digit, text.data() + text.size(), number);
  if (error != std::errc{}) return std::nullopt;
  return number;
}

/// The number that follows `key` at the beginning of a line, such as "VmHWM:" in status or "inactive_file "
/// in memory.stat.
inline std::optional<std::uint64_t> number_after(std::string_view text, std::string_view key) {
  for (std::size_t begin = 0; begin < text.size();) {
    const auto line = text.substr(begin, text.find('\n', begin) - begin);
    if (line.starts_with(key)) return leading_number(line.substr(key.size()));
    begin += line.size() + 1;
  }
  return std::nullopt;
}

}  // namespace accelmgr::ipc
