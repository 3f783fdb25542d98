// Cuts what a process writes into lines, each behind a prefix.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace accelmgr::program {

class LinePrefixer {
 public:
  /// A line longer than this is cut into several: a process that never ends one costs no more memory.
  static constexpr std::size_t longest_line_bytes = 64 * 1024;

  explicit LinePrefixer(std::string prefix) : prefix_(std::move(prefix)) {}

  /// Appends the lines that `bytes` completes.
  void feed(std::string_view bytes, std::string& out);
  /// Appends the last line, if it has no end.
  void finish(std::string& out);

 private:
  std::string prefix_;
  std::string begun_;  ///< Of a line without its end yet.
};

}  // namespace accelmgr::program
