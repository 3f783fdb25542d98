// One output stream of one process. It comes through a pipe and goes to the terminal, with a prefix before
// each line, and unchanged into a file.
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
#include "launcher/agent/line_prefixer.hpp"
#include "launcher/agent/terminal.hpp"

namespace accelmgr::agent {

class RankOutput {
 public:
  /// `stream` is 1 or 2, of the process and of the terminal. `log` is a file, which is overwritten; empty for
  /// none. Throws SystemError, which names the file.
  RankOutput(int stream, std::string prefix, const std::filesystem::path& log);

  int stream() const noexcept { return stream_; }
  int read_end() const noexcept { return read_end_.get(); }
  int write_end() const noexcept { return write_end_.get(); }
  /// Call it when the process has the write end.
  void close_write_end() noexcept { write_end_.reset(); }

  /// Forwards what the pipe holds, one buffer at most. Does not block. False at the end of the stream.
  bool take(Terminal& terminal);
  /// Call it when the process has ended: forwards the rest. Does not wait for other processes that hold the
  /// pipe.
  void finish(Terminal& terminal);

  /// The last lines, at most `most`.
  std::vector<std::string> last_lines(std::size_t most) const;

 private:
  /// The number of bytes read; 0 at the end; nullopt if there are none now.
  std::optional<std::size_t> read_some(Terminal& terminal);
  void log(std::string_view bytes);

  int stream_;
  base::UniqueFd read_end_, write_end_, log_;
  std::filesystem::path log_name_;
  LinePrefixer lines_;
  std::array<char, 8192> tail_{};  // base/log_tail.hpp
  std::atomic<std::uint64_t> tail_written_{0};
};

}  // namespace accelmgr::agent
