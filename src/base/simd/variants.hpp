// Kernels are compiled once for each instruction set; which variants run here, and which is the fastest.
// Thread-safe.
#pragma once

#include <cstddef>
#include <type_traits>

namespace accelmgr::base::simd {

/// In the order of their speed.
enum class Isa { portable, avx2, avx512 };
const char* to_string(Isa isa) noexcept;

/// avx2 includes F16C; avx512 is F, BW, VL and DQ. The flags of src/cmake/Kernels.cmake say the same.
bool machine_has(Isa isa) noexcept;

/// A set of kernels, made of an Isa and its table of functions.
template <class Kernels>
class Variants {
 public:
  /// A table is null where the compiler does not know the instruction set; the portable one never is.
  template <class Table>
  Variants(const Table* portable, const std::type_identity_t<Table>* avx2,
           const std::type_identity_t<Table>* avx512) noexcept
      : kernels_{{Isa::portable, portable}, {Isa::avx2, avx2}, {Isa::avx512, avx512}},
        usable_{true, avx2 && machine_has(Isa::avx2), avx512 && machine_has(Isa::avx512)} {
    for (std::size_t i = 1; i < count; ++i)
      if (usable_[i]) best_ = i;
  }

  /// Null when this machine or the compiler lacks it.
  const Kernels* find(Isa isa) const noexcept {
    const auto i = static_cast<std::size_t>(isa);
    return usable_[i] ? &kernels_[i] : nullptr;
  }
  const Kernels& best() const noexcept { return kernels_[best_]; }

 private:
  static constexpr std::size_t count = 3;
  Kernels kernels_[count];  ///< [isa]
  bool usable_[count];
  std::size_t best_ = 0;
};

}  // namespace accelmgr::base::simd
