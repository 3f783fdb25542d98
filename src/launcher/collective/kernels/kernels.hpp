// Vectorized passes over the buffers of a collective: reduce the inputs of several ranks, copy, convert.
//
// Every variant gives the same bits, except for payloads of NaN: inputs are combined in their order, wherever
// an element lies in its buffer, and nothing is contracted. Addresses need no alignment; multiples of 64
// bytes are fastest. Thread-safe. No call blocks or throws. Stores past the caches are fenced before a call
// returns.
#pragma once

#include <cstddef>
#include <span>

#include "accelmgr/communicator.hpp"
#include "base/simd/variants.hpp"
#include "launcher/collective/kernels/kernels_table.hpp"

namespace accelmgr::collective {

using base::simd::Isa;

/// Whether results are stored through the caches. Results larger than the caches are better stored past them.
enum class Stores { cached, past_caches };

class Kernels : public base::simd::Variant<KernelTable> {
 public:
  using Variant::Variant;

  /// out[i] = ((inputs[0][i] op inputs[1][i]) op inputs[2][i]) op ..., for one input or more, each of `count`
  /// elements. `out` may be one of the inputs. `avg` divides the sum by `divisor`, the number of ranks, which
  /// is larger than the number of inputs when these are partial sums. With divisor 1 nothing is divided.
  /// float16 and bfloat16 are combined in float32 and rounded to nearest even at the end. min and max are NaN
  /// if any input is. Integers wrap around. Results of booleans are 0 or 1. `dtype` and `op` must have passed
  /// check_reduction().
  void reduce(DType dtype, ReduceOp op, std::span<const void* const> inputs, void* out, std::size_t count,
              std::size_t divisor = 1, Stores stores = Stores::cached) const noexcept {
    const auto row = static_cast<std::size_t>(dtype), column = static_cast<std::size_t>(op);
    const auto here = table_->reduce[row][column];
    (here != nullptr ? here : portable_kernels->reduce[row][column])(inputs.data(), inputs.size(), out, count,
                                                                     static_cast<double>(divisor),
                                                                     stores == Stores::past_caches);
  }

  /// `out` and `in` must be the same address or not overlap.
  void copy(void* out, const void* in, std::size_t bytes, Stores stores) const noexcept;

  /// Converts float16 or bfloat16 to float32 (widen, exact) and back (narrow, rounded to nearest even), for
  /// reductions of several steps that round only once. `in` and `out` must not overlap.
  void widen(DType dtype, const void* in, float* out, std::size_t count) const noexcept {
    table_->widen[dtype == DType::bfloat16](out, in, count);
  }
  void narrow(DType dtype, const float* in, void* out, std::size_t count) const noexcept {
    table_->narrow[dtype == DType::bfloat16](out, in, count);
  }
};

/// The fastest variant that this machine can run.
const Kernels& best_kernels() noexcept;

/// The variant for `isa`; null when this machine or the compiler lacks it.
const Kernels* kernels(Isa isa) noexcept;

}  // namespace accelmgr::collective
