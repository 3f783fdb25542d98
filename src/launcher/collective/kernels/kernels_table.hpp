// What every variant of the kernels provides: plain function pointers. A variant may include only this header
// and the headers of base/simd that are made for variants. It must not include inline functions that other
// files use: the linker might keep the copy that was compiled for the newer instruction set.
#pragma once

#include <cstddef>

namespace accelmgr::collective {

/// Sizes of the table below, whose rows and columns are in the order of DType and ReduceOp.
inline constexpr std::size_t kernel_dtypes = 15;
inline constexpr std::size_t kernel_ops = 7;

struct KernelTable {
  using Reduce = void (*)(const void* const* inputs, std::size_t inputs_count, void* out, std::size_t count,
                          double divisor, bool past_caches) noexcept;

  Reduce reduce[kernel_dtypes][kernel_ops];  ///< Null: the portable table may have it.
  void (*copy_past_caches)(void* out, const void* in, std::size_t bytes) noexcept;
  void (*widen[2])(void* out, const void* in, std::size_t count) noexcept;   ///< [float16, bfloat16]
  void (*narrow[2])(void* out, const void* in, std::size_t count) noexcept;  ///< [float16, bfloat16]
};

/// Null where the compiler does not know the instruction set.
extern const KernelTable* const portable_kernels;
extern const KernelTable* const avx2_kernels;
extern const KernelTable* const avx512_kernels;

}  // namespace accelmgr::collective
