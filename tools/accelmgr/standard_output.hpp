// What the program says on standard output.
#pragma once

#include <string_view>

namespace accelmgr::program {

/// Writes `text` now. What cannot be written is dropped: a run goes on when a disk is full.
void print_out(std::string_view text) noexcept;

/// The exit code of the program that would end with `exit_code`: one that is 0 becomes 1 when standard output
/// could not be written, which is said on standard error. Nothing is written behind it.
int checked_output(int exit_code) noexcept;

}  // namespace accelmgr::program
