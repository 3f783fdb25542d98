// One output stream of one process: through a pipe, line by line behind a prefix to the terminal, and as it
// is into a file.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.hpp"
#include "line_prefixer.hpp"
#include "terminal.hpp"

namespace accelmgr::program {

class RankOutput {
 public:
  /// `stream`: 1 or 2, of the process and of the terminal. `log`: a file, made anew; empty: none. Throws
  /// SystemError, which names the file.
  RankOutput(int stream, std::string prefix, const std::filesystem::path& log);

  int stream() const noexcept { return stream_; }
  int read_end() const noexcept { return read_end_.get(); }
  int write_end() const noexcept { return write_end_.get(); }
  /// Once the process has it.
  void close_write_end() noexcept { write_end_.reset(); }

  /// Takes what is there, a buffer full at most. False when nothing will come any more.
  bool take(Terminal& terminal);
  /// The process has ended: takes what is left. Whoever else may hold the pipe is not waited for.
  void finish(Terminal& terminal);

  /// The last of it, at most `most`.
  std::vector<std::string> last_lines(std::size_t most) const;

 private:
  /// How much there was; 0 at the end; nullopt: nothing now.
  std::optional<std::size_t> read_some(Terminal& terminal);
  void log(std::string_view bytes);

  int stream_;
  base::UniqueFd read_end_, write_end_, log_;
  std::filesystem::path log_name_;
  LinePrefixer lines_;
  std::array<char, 8192> tail_{};  // base/log_tail.hpp
  std::atomic<std::uint64_t> tail_written_{0};
};

}  // namespace accelmgr::program
