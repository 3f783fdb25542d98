// Splits the output of a process into lines and puts a prefix before each.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace accelmgr::agent {

class LinePrefixer {
 public:
  /// Longer lines are split. This bounds the memory for a process that never ends a line.
  static constexpr std::size_t longest_line_bytes = 64 * 1024;

  explicit LinePrefixer(std::string prefix) : prefix_(std::move(prefix)) {}

  /// Appends the lines that `bytes` completes.
  void feed(std::string_view bytes, std::string& out);
  /// Appends the last line if it has no line end.
  void finish(std::string& out);

 private:
  std::string prefix_;
  std::string begun_;  ///< The beginning of a line whose end has not come yet.
};

}  // namespace accelmgr::agent
