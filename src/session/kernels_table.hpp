// What every variant of the kernels provides: plain function pointers. The variants see this header and, of
// other folders, those of base/simd that are made for them: no inline function that others use.
#pragma once

#include <cstddef>

namespace accelmgr::session {

enum class SumInto { overwrite, overwrite_non_temporal, accumulate };
enum class TakeOver { copy, copy_non_temporal, add };

struct KernelTable {
  using Reduce = void (*)(void* master, const void* const* slabs, std::size_t slab_count, std::size_t count,
                          double scale, SumInto into) noexcept;
  using TakeOverGradient = bool (*)(void* slab, const void* gradient, std::size_t count,
                                    TakeOver how) noexcept;

  // [master: f32, f64][slab: same, bf16]
  Reduce reduce[2][2];
  TakeOverGradient take_over[2][2];
  void (*save)(void* image, const void* chunk, std::size_t bytes) noexcept;
  void (*zero_non_temporal)(void* begin, std::size_t bytes) noexcept;
};

/// Null where the compiler does not know the instruction set.
extern const KernelTable* const portable_kernels;
extern const KernelTable* const avx2_kernels;
extern const KernelTable* const avx512_kernels;

}  // namespace accelmgr::session
