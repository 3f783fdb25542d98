// The last log lines of a process, in memory that survives its death: a ring of bytes, and `written`, the
// number of bytes ever written to it. Byte i is at position i mod the size of the ring.
//
//   ... old old | NUL | 12:00:01 info one\n12:00:02 info two\n | (written mod size: the next goes here)
//
// One NUL separates the last byte from the oldest one. A process that is killed while it writes a line leaves
// the first bytes of the line, then NULs, in the place of the oldest bytes. The reader ignores everything
// before the last NUL.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace accelmgr::base {

/// Appends `line`; if it is longer than the ring, its end. `written` grows by the whole length, and is stored
/// (release) after the bytes. A NUL in `line` becomes a blank. A ring of less than two bytes stays empty.
/// Requires: the caller is the only writer.
void append_to_tail(std::span<char> text, std::atomic<std::uint64_t>& written,
                    std::string_view line) noexcept;

/// Returns the last complete lines, at most `most`, oldest first, without newlines. If even the last line is
/// longer than the ring, returns "..." and its end. `text` may hold any bytes: U+FFFD replaces what is not
/// UTF-8.
std::vector<std::string> log_lines(std::span<const char> text, std::uint64_t written, std::size_t most);

}  // namespace accelmgr::base
