// The standard output of the program.
#pragma once

#include <string_view>

namespace accelmgr::program {

/// Writes `text` at once. Text that cannot be written is dropped: a run goes on even if a disk is full.
void print_out(std::string_view text) noexcept;

/// Call it last. If standard output could not be written, prints that on standard error and turns exit code 0
/// into 1. Otherwise returns `exit_code`.
int checked_output(int exit_code) noexcept;

}  // namespace accelmgr::program
