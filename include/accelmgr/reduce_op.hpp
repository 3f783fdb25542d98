// The operations of reductions between processes.
#pragma once

#include <cstdint>
#include <string_view>

#include "accelmgr/dtype.hpp"

namespace accelmgr {

/// Values are combined in the order of ranks. float16 and bfloat16 are combined in float32 and rounded once
/// at the end. Sums and products of integers wrap around. avg is the sum divided by the number of ranks.
/// bit_and and bit_or are torch's BAND and BOR; on booleans they are logical. The sum of booleans is their
/// disjunction, the product their conjunction.
enum class ReduceOp : std::uint8_t { sum, avg, product, min, max, bit_and, bit_or };
std::string_view name_of(ReduceOp op) noexcept;  ///< "SUM", "AVG", ... "AND", "OR".

/// Throws UsageError, which names both, when `dtype` does not support `op`: avg of integers and booleans, min
/// and max of complex numbers, bit_and and bit_or of anything but integers and booleans.
void check_reduction(DType dtype, ReduceOp op);

}  // namespace accelmgr
