// The last log lines of a process, in memory that survives its death: a ring of bytes and the number of all
// that were ever written to it. Byte i of these stands at i mod the ring's size.
//
//   ... old old | NUL | 12:00:01 info one\n12:00:02 info two\n | (written mod size: the next goes here)
//
// One NUL stands between the last byte and the oldest one. A process killed while it writes a line leaves its
// first bytes, then NULs, over what was oldest: the reader takes nothing from before the last NUL.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace accelmgr::base {

/// Of a line longer than the ring, its end. `written` counts all of it, and is stored (release) after the
/// bytes; the caller is the only writer. A NUL in `line` becomes a blank. A ring of less than two bytes holds
/// nothing.
void append_to_tail(std::span<char> text, std::atomic<std::uint64_t>& written,
                    std::string_view line) noexcept;

/// The last complete lines, at most `most`, oldest first, without their ends of line. When even the last is
/// longer than the ring: its end, after "...". What is no UTF-8 is replaced by U+FFFD. Takes any bytes.
std::vector<std::string> log_lines(std::span<const char> text, std::uint64_t written, std::size_t most);

}  // namespace accelmgr::base
