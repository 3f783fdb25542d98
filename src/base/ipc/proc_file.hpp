// Reading files of /proc and /sys, whose size is known only when they have been read.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "base/unique_fd.hpp"

namespace accelmgr::ipc {

/// The whole file; nullopt if it cannot be read, because there is no such file, process or control group.
/// No std::ifstream: a program that another thread executes meanwhile would inherit its descriptor.
inline std::optional<std::string> read_proc(const std::filesystem::path& path) {
  const base::UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return std::nullopt;
  std::string text;
  char part[4096];
  for (;;) {
    const auto bytes = read(fd.get(), part, sizeof part);
    if (bytes == 0) return text;
    if (bytes > 0)
      text.append(part, static_cast<std::size_t>(bytes));
    else if (errno != EINTR)
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
