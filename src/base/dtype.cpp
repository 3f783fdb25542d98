#include "accelmgr/dtype.hpp"

#include <fmt/format.h>

#include <array>

#include "accelmgr/errors.hpp"

namespace accelmgr {
namespace {

struct Entry {
  std::string_view name;
  std::size_t bytes;
};

constexpr std::array dtypes{
    Entry{"uint8", 1},
    Entry{"int8", 1},
    Entry{"uint16", 2},
    Entry{"int16", 2},
    Entry{"uint32", 4},
    Entry{"int32", 4},
    Entry{"uint64", 8},
    Entry{"int64", 8},
    Entry{"float16", 2},
    Entry{"bfloat16", 2},
    Entry{"float32", 4},
    Entry{"float64", 8},
    Entry{"complex64", 8},
    Entry{"complex128", 16},
    Entry{"bool", 1},
    Entry{"complex32", 4},
    Entry{"float8_e5m2", 1},
    Entry{"float8_e4m3fn", 1},
    Entry{"float8_e5m2fnuz", 1},
    Entry{"float8_e4m3fnuz", 1},
    Entry{"float8_e8m0fnu", 1},
};
static_assert(dtypes.size() == dtype_count);

}  // namespace

std::size_t size_of(DType dtype) noexcept { return dtypes[static_cast<std::size_t>(dtype)].bytes; }

std::string_view name_of(DType dtype) noexcept { return dtypes[static_cast<std::size_t>(dtype)].name; }

DType dtype_of_number(std::uint64_t number) {
  if (number >= dtype_count)
    throw UsageError(
        fmt::format("{} is not the number of a dtype; it must be 0 to {}", number, dtype_count - 1));
  return static_cast<DType>(number);
}

}  // namespace accelmgr
