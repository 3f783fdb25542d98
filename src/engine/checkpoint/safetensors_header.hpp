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

#include "accelmgr/dtype.hpp"

namespace accelmgr::checkpoint {

inline constexpr std::uint64_t safetensors_length_bytes = 8;
/// The limit of N that the format sets.
inline constexpr std::uint64_t safetensors_header_limit = 100'000'000;
inline constexpr const char* safetensors_metadata_key = "__metadata__";

/// Convert between dtypes and their names in a file; nullopt for an unknown name. Known are F64, F32, F16,
/// BF16, F8_E4M3, F8_E5M2, F8_E4M3FNUZ, F8_E5M2FNUZ, F8_E8M0, C64, I64, I32, I16, I8, U64, U32, U16, U8,
/// BOOL, and two that the format does not have: C128 (complex128), C32 (complex32).
std::optional<DType> dtype_in_file(std::string_view name);
std::string_view name_in_file(DType dtype);
/// Bytes of an element; nullopt for an unknown dtype.
std::optional<std::uint64_t> dtype_bytes(std::string_view name);

/// Bytes of a tensor. Throws CheckpointError, whose text begins with `where`, for an unknown dtype, a
/// negative size, and more bytes than signed 64 bits can count.
std::uint64_t tensor_bytes(const std::string& where, const std::string& dtype,
                           const std::vector<std::int64_t>& shape);

/// Where a tensor lies. `begin` is an offset in bytes from the beginning of the file.
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

/// Checks the whole format in `image`, a whole file. Throws CheckpointError, which names the file as `where`.
SafetensorsHeader read_safetensors_header(std::span<const std::byte> image, const std::string& where);

}  // namespace accelmgr::checkpoint
