// Where the processes of a host meet that may do something only one at a time: a memory of named places, made
// by the first of them that needs it, found by the others through $ACCELMGR_SERIAL_MEMORY or inherited.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>

namespace accelmgr::launch {

inline constexpr int serial_places = 64;
inline constexpr std::size_t max_serial_name_bytes = 47;

/// The path by which other processes find the memory of this one, as long as this one lives: the value of
/// $ACCELMGR_SERIAL_MEMORY for what it launches. Makes it if need be. Throws SystemError, SessionError.
std::string serial_memory_path();

/// A lock of all processes with the same memory. Its holder's end frees it.
struct SerialPlace;

/// The place of that name, in the memory that the environment of this process names now. Throws ConfigError
/// when all places have other names, SessionError when the memory is not what it should be.
SerialPlace& serial_place(std::string_view name);

/// Whether it got in within the time. Throws UsageError in a thread that is inside.
bool enter(SerialPlace& place, double timeout_s);
void leave(SerialPlace& place) noexcept;
/// The process inside; 0: none.
pid_t holder(const SerialPlace& place) noexcept;

}  // namespace accelmgr::launch
