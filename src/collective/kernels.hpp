// The passes over buffers that collectives make, vectorized: the reduction of the inputs of several ranks.
//
// Every variant gives the same bits (payloads of NaN excepted): inputs are combined in their order, whatever
// the place of an element in its buffer, and nothing is contracted. Addresses need no alignment; 64 bytes are
// fastest. Thread-safe; nothing blocks or throws. Stores past the caches are fenced before a call returns.
#pragma once

#include <cstddef>
#include <span>

#include "accelmgr/communicator.hpp"
#include "base/simd/variants.hpp"
#include "collective/kernels_table.hpp"

namespace accelmgr::collective {

using base::simd::Isa;

/// Where what is written stays: results that are larger than the caches are better written past them.
enum class Stores { cached, past_caches };

class Kernels {
 public:
  Kernels(Isa isa, const KernelTable* table) noexcept : isa_(isa), table_(table) {}
  Isa isa() const noexcept { return isa_; }

  /// out[i] = ((inputs[0][i] op inputs[1][i]) op inputs[2][i]) op ..., of one input or more, each of `count`
  /// elements; `out` may be one of them. `avg` divides the sum by `divisor`: the number of ranks, of which
  /// the inputs may be but the last partial sums; 1: it does not divide. float16 and bfloat16 are combined in
  /// float32 and rounded to nearest even at the end. min and max: NaN if any is. Integers wrap around;
  /// booleans are 0 or 1 afterwards. `dtype` and `op` have passed check_reduction().
  void reduce(DType dtype, ReduceOp op, std::span<const void* const> inputs, void* out, std::size_t count,
              std::size_t divisor = 1, Stores stores = Stores::cached) const noexcept {
    table_->reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)](
        inputs.data(), inputs.size(), out, count, static_cast<double>(divisor),
        stores == Stores::past_caches);
  }

  /// The two do not overlap, or are the same.
  void copy(void* out, const void* in, std::size_t bytes, Stores stores) const noexcept;

  /// float16 or bfloat16 as float32, exactly; and back, rounded to nearest even. To reduce them in several
  /// steps and round but once. The two do not overlap.
  void widen(DType dtype, const void* in, float* out, std::size_t count) const noexcept {
    table_->widen[dtype == DType::bfloat16](in, out, count);
  }
  void narrow(DType dtype, const float* in, void* out, std::size_t count) const noexcept {
    table_->narrow[dtype == DType::bfloat16](in, out, count);
  }

 private:
  Isa isa_;
  const KernelTable* table_;
};

/// The fastest that this machine can run.
const Kernels& best_kernels() noexcept;

/// One variant; null when this machine or the compiler lacks it.
const Kernels* kernels(Isa isa) noexcept;

}  // namespace accelmgr::collective
