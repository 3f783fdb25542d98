// What memory holds, compared with what it held, in microseconds also where it is large.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace accelmgr::python {

/// Of memory that has more bytes than so many pieces of 64 bytes, that many pieces at equal distances are
/// compared: a write to all of it is seen, a write to a few elements may not be.
inline constexpr std::size_t usual_pieces = 1024;

/// Whether both hold the same. Requires: they are of equal size; pieces > 1.
bool is_alike(std::span<const std::byte> one, std::span<const std::byte> other, std::size_t pieces) noexcept;

/// A hash of what they hold. Requires: pieces > 1.
std::uint64_t digest(std::span<const std::byte> memory, std::size_t pieces) noexcept;

/// The memory of a tensor of the CPU, or of another object with a buffer. Of a tensor with gaps in its memory
/// it is a part. Empty if there is none.
///
/// It is the object's own only as long as nothing gives it other memory, and the caller holds the
/// interpreter's lock. Throws python_error if there is a buffer that has gaps.
std::span<const std::byte> memory_of_object(nanobind::handle owner);

/// Where the first byte of a tensor is: one call, where memory_of_object() makes five. Requires: the caller
/// holds the interpreter's lock.
std::uintptr_t address_of_tensor(nanobind::handle tensor);

}  // namespace accelmgr::python
