#include "engine/checkpoint/checksum.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "accelmgr/errors.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace accelmgr::checkpoint {
namespace {

constexpr std::size_t piece_bytes = std::size_t{1} << 20;

std::string printed(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  std::string text = checksum_prefix;
  for (const unsigned char byte : canonical.digest) text += fmt::format("{:02x}", byte);
  return text;
}

}  // namespace

std::string checksum_of(std::span<const std::byte> bytes) {
  return printed(XXH3_128bits(bytes.data(), bytes.size()));
}

std::string checksum_of_file(int fd, std::uint64_t bytes, const std::string& path) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  std::vector<std::byte> piece(std::min<std::uint64_t>(piece_bytes, bytes));
  for (std::uint64_t at = 0; at < bytes;) {
    const auto wanted = std::min<std::uint64_t>(piece.size(), bytes - at);
    const ssize_t count = pread(fd, piece.data(), wanted, static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw SystemError(fmt::format("reading '{}' at byte {}", path, at), errno);
    if (count == 0) break;  // The file was shortened; its checksum will differ.
    XXH3_128bits_update(&state, piece.data(), static_cast<std::size_t>(count));
    at += static_cast<std::uint64_t>(count);
  }
  return printed(XXH3_128bits_digest(&state));
}

}  // namespace accelmgr::checkpoint
