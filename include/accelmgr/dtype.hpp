// Element types, named as in torch and NumPy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace accelmgr {

/// Reductions support the types up to `boolean`; the other types can only be moved.
enum class DType : std::uint8_t {
  uint8,
  int8,
  uint16,
  int16,
  uint32,
  int32,
  uint64,
  int64,
  float16,
  bfloat16,
  float32,
  float64,
  complex64,
  complex128,
  boolean,
  complex32,
  float8_e5m2,
  float8_e4m3fn,
  float8_e5m2fnuz,
  float8_e4m3fnuz,
  float8_e8m0fnu,
};
constexpr std::size_t dtype_count = static_cast<std::size_t>(DType::float8_e8m0fnu) + 1;

std::size_t size_of(DType dtype) noexcept;       ///< Bytes of one element.
std::string_view name_of(DType dtype) noexcept;  ///< As torch writes it: "float32", "bool".
/// Converts a number from another process or a file. Throws UsageError for a number that is no DType.
DType dtype_of_number(std::uint64_t number);

}  // namespace accelmgr
