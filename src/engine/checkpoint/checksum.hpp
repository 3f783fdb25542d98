// Checksums that detect damaged files: XXH3, 128 bits. They do not protect against an adversary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace accelmgr::checkpoint {

/// Every checksum begins with this prefix. Another algorithm would have another one.
inline constexpr const char* checksum_prefix = "xxh3-128:";

/// The prefix and 32 hexadecimal digits, in xxHash's canonical order.
std::string checksum_of(std::span<const std::byte> bytes);

/// The checksum of the first `bytes` bytes of a file. Reads the file piece by piece, so that a failing medium
/// is an error and not a SIGBUS of a mapping. Throws SystemError with `path`.
std::string checksum_of_file(int fd, std::uint64_t bytes, const std::string& path);

}  // namespace accelmgr::checkpoint
