#include <fmt/format.h>

#include <array>

#include "accelmgr/communicator.hpp"

namespace accelmgr {
namespace {

struct DTypeEntry {
  std::string_view name;
  std::size_t bytes;
};

constexpr std::array dtypes{
    DTypeEntry{"uint8", 1},     DTypeEntry{"int8", 1},        DTypeEntry{"uint16", 2},
    DTypeEntry{"int16", 2},     DTypeEntry{"uint32", 4},      DTypeEntry{"int32", 4},
    DTypeEntry{"uint64", 8},    DTypeEntry{"int64", 8},       DTypeEntry{"float16", 2},
    DTypeEntry{"bfloat16", 2},  DTypeEntry{"float32", 4},     DTypeEntry{"float64", 8},
    DTypeEntry{"complex64", 8}, DTypeEntry{"complex128", 16}, DTypeEntry{"bool", 1},
};
static_assert(dtypes.size() == static_cast<std::size_t>(DType::boolean) + 1);

constexpr std::array<std::string_view, 7> reductions{"SUM", "AVG", "PRODUCT", "MIN", "MAX", "AND", "OR"};
static_assert(reductions.size() == static_cast<std::size_t>(ReduceOp::bit_or) + 1);

bool is_complex(DType dtype) noexcept { return dtype == DType::complex64 || dtype == DType::complex128; }

bool is_floating(DType dtype) noexcept { return dtype >= DType::float16 && dtype <= DType::float64; }

bool makes_sense(DType dtype, ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::product:
      return true;
    case ReduceOp::avg:
      return is_floating(dtype) || is_complex(dtype);
    case ReduceOp::min:
    case ReduceOp::max:
      return !is_complex(dtype);
    case ReduceOp::bit_and:
    case ReduceOp::bit_or:
      return !is_floating(dtype) && !is_complex(dtype);
  }
  return false;
}

}  // namespace

std::size_t size_of(DType dtype) noexcept { return dtypes[static_cast<std::size_t>(dtype)].bytes; }

std::string_view name_of(DType dtype) noexcept { return dtypes[static_cast<std::size_t>(dtype)].name; }

std::string_view name_of(ReduceOp op) noexcept { return reductions[static_cast<std::size_t>(op)]; }

void check_reduction(DType dtype, ReduceOp op) {
  if (!makes_sense(dtype, op))
    throw UsageError(fmt::format("{} of {} makes no sense", name_of(op), name_of(dtype)));
}

}  // namespace accelmgr
