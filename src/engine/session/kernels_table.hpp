// The table of function pointers that every variant of the kernels provides. A variant includes only this
// header and the headers that base/simd has for variants: an inline function that other files use too could
// reach them compiled for an instruction set that the machine lacks.
#pragma once

#include <cstddef>

namespace accelmgr::session {

enum class SumInto { overwrite, overwrite_non_temporal, accumulate };
enum class CaptureMode { copy, copy_non_temporal, add };

/// A piece of a parameter, its gradient and its moments; and where the new values go.
struct UpdateArrays {
  const void* gradient;
  const void* parameter;
  const void* first;
  const void* second;
  void* new_parameter;
  void* new_first;
  void* new_second;
  std::size_t count;
};

struct SgdFactors {
  double gradient;  ///< The gradient is multiplied by this first.
  double decay;     ///< The parameter times this is added to the gradient.
  double momentum;
  double step;
  bool nesterov;
};

struct AdamFactors {
  double gradient;  ///< The gradient is multiplied by this first.
  double decay;     ///< adam: the parameter times this is added to the gradient.
  double shrink;    ///< adamw: the parameter is multiplied by this before its step.
  double first;     ///< 1 - beta1
  double beta2;
  double step;        ///< The learning rate, divided by 1 - beta1^n for update n.
  double correction;  ///< The root of the second moment is divided by this: the root of 1 - beta2^n.
  double epsilon;
};

struct KernelTable {
  using Reduce = void (*)(void* master, const void* const* slabs, std::size_t slab_count, std::size_t count,
                          double scale, SumInto into) noexcept;
  using GradientCapture = double (*)(void* slab, const void* gradient, std::size_t count,
                                     CaptureMode how) noexcept;

  // By Element: f32, f64, bf16, f16. Null for pairs that do not occur.
  Reduce reduce[4][4];            ///< [master][slab]
  GradientCapture capture[4][4];  ///< [gradient][slab]
  double (*largest[4])(const void* values, std::size_t count) noexcept;
  double (*squares[4])(const void* values, std::size_t count) noexcept;
  void (*sgd[4][4])(const UpdateArrays& arrays,
                    const SgdFactors& factors) noexcept;  ///< [parameter][gradient]
  void (*adam[4][4])(const UpdateArrays& arrays,
                     const AdamFactors& factors) noexcept;  ///< [parameter][gradient]
  void (*round_to_bf16)(void* to, const void* from, std::size_t count) noexcept;
  void (*save)(void* image, const void* chunk, std::size_t bytes) noexcept;
  void (*zero_non_temporal)(void* begin, std::size_t bytes) noexcept;
};

/// Null if the compiler does not know the instruction set.
extern const KernelTable* const portable_kernels;
extern const KernelTable* const avx2_kernels;
extern const KernelTable* const avx512_kernels;

}  // namespace accelmgr::session
