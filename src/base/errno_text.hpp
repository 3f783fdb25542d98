// Error texts for errno values, and which values mean that the machine is short of something.
#pragma once

#include <string>

namespace accelmgr::base {

/// The text of the C library and, if a limit is the cause, what to do: "Too many open files: raise ulimit
/// -n (now 20)".
std::string errno_text(int code);

/// Whether `code` means that the machine lacks something: descriptors, memory, room on a disk.
bool is_shortage(int code) noexcept;

}  // namespace accelmgr::base
