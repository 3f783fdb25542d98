// Kernels are compiled once for each instruction set. This says which variants this machine can run, and
// which is the fastest. Thread-safe.
#pragma once

#include <cstddef>
#include <type_traits>

namespace accelmgr::base::simd {

/// Ordered by speed, slowest first.
enum class Isa { portable, avx2, avx512 };
const char* to_string(Isa isa) noexcept;

/// avx2 includes F16C. avx512 means F, BW, VL and DQ. The flags in tools/cmake/Kernels.cmake must agree.
bool machine_has(Isa isa) noexcept;

/// Base of a set of kernels: the functions that were compiled for an instruction set.
template <class Table>
class Variant {
 public:
  Variant(Isa isa, const Table* table) noexcept : table_(table), isa_(isa) {}
  Isa isa() const noexcept { return isa_; }

 protected:
  const Table* table_;

 private:
  Isa isa_;
};

/// The variants of a set of kernels. `Kernels` is made of an Isa and a pointer to its table of functions.
template <class Kernels>
class Variants {
 public:
  /// A table is null if the compiler does not know the instruction set. `portable` is never null.
  template <class Table>
  Variants(const Table* portable, const std::type_identity_t<Table>* avx2,
           const std::type_identity_t<Table>* avx512) noexcept
      : kernels_{{Isa::portable, portable}, {Isa::avx2, avx2}, {Isa::avx512, avx512}},
        usable_{true, avx2 && machine_has(Isa::avx2), avx512 && machine_has(Isa::avx512)} {
    for (std::size_t i = 1; i < count; ++i)
      if (usable_[i]) best_ = i;
  }

  /// Null if this machine or the compiler lacks `isa`.
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
