#include "accelmgr/reduce_op.hpp"

#include <fmt/format.h>

#include <array>

#include "accelmgr/errors.hpp"

namespace accelmgr {
namespace {

constexpr std::array<std::string_view, 7> reductions{"SUM", "AVG", "PRODUCT", "MIN", "MAX", "AND", "OR"};
static_assert(reductions.size() == static_cast<std::size_t>(ReduceOp::bit_or) + 1);

bool is_complex(DType dtype) noexcept { return dtype == DType::complex64 || dtype == DType::complex128; }

bool is_floating(DType dtype) noexcept { return dtype >= DType::float16 && dtype <= DType::float64; }

bool makes_sense(DType dtype, ReduceOp op) noexcept {
  if (dtype > DType::boolean) return false;
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

std::string_view name_of(ReduceOp op) noexcept { return reductions[static_cast<std::size_t>(op)]; }

void check_reduction(DType dtype, ReduceOp op) {
  if (!makes_sense(dtype, op))
    throw UsageError(fmt::format("the reduction {} of {} is not defined", name_of(op), name_of(dtype)));
}

}  // namespace accelmgr
