// Checksums that tell a damaged file from a whole one: XXH3, 128 bits. They do not protect against an
// adversary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace accelmgr::checkpoint {

/// What every checksum begins with: another kind will have another prefix.
inline constexpr const char* checksum_prefix = "xxh3-128:";

/// The prefix and 32 hexadecimal digits, in xxHash's canonical order.
std::string checksum_of(std::span<const std::byte> bytes);

/// The same of the first `bytes` of a file, which is read piece by piece: a medium that fails is an error
/// here, where a mapping would be a SIGBUS. Throws SystemError with `path`.
std::string checksum_of_file(int fd, std::uint64_t bytes, const std::string& path);

}  // namespace accelmgr::checkpoint
