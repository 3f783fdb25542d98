// The header of a safetensors file (https://github.com/huggingface/safetensors, "Format"):
//
//   0         8                  8 + N                              end
//   +---------+------------------+----------+----------+-- ... -----+
//   | N, u64, | JSON, padded     | tensor   | tensor   |            |
//   | little  | with spaces      |          |          |            |
//   +---------+------------------+----------+----------+-- ... -----+
//
// The JSON maps a name to {"dtype", "shape", "data_offsets": [begin, end]}, counted from 8 + N, and
// "__metadata__" to texts. The tensors fill the rest of the file: no gap, no overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace accelmgr::checkpoint {

inline constexpr std::uint64_t safetensors_length_bytes = 8;
/// The format's own limit of N.
inline constexpr std::uint64_t safetensors_header_limit = 100'000'000;
inline constexpr const char* safetensors_metadata_key = "__metadata__";

/// Bytes of an element; nullopt for a dtype that accelmgr does not know: F64, F32, F16, BF16, I64, I32, I16,
/// I8, U8 and BOOL are known.
std::optional<std::uint64_t> dtype_bytes(std::string_view dtype);

/// Bytes of a tensor. Throws CheckpointError for an unknown dtype, a negative size, and what 64 bits cannot
/// count; it begins with `where`.
std::uint64_t tensor_bytes(const std::string& where, const std::string& dtype,
                           const std::vector<std::int64_t>& shape);

/// `begin` is counted from the first byte of the file.
struct TensorPlace {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
};

struct SafetensorsHeader {
  std::map<std::string, TensorPlace> tensors;
  std::map<std::string, std::string> metadata;
};

/// Checks all that the format says against `image`, a whole file. Throws CheckpointError, which names the
/// file as `where`.
SafetensorsHeader read_safetensors_header(std::span<const std::byte> image, const std::string& where);

}  // namespace accelmgr::checkpoint
