// Bytes as text (RFC 4648, section 4), for binary values in a checkpoint's JSON.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace accelmgr::checkpoint {

std::string encode_base64(std::span<const std::byte> bytes);

/// Throws CheckpointError for any text that encode_base64() would not write.
std::vector<std::byte> decode_base64(std::string_view text);

}  // namespace accelmgr::checkpoint
