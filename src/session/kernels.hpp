// The passes over gradients, vectorized: summing slabs into the master, taking a gradient over into a slab,
// zeroing.
//
// Every variant gives the same bits (payloads of NaN excepted): the order of additions is that of the slabs,
// and nothing is contracted. Addresses need the alignment of their elements only; 64 bytes are fastest.
// Thread-safe; nothing blocks or throws. Non-temporal stores are fenced before a call returns.
#pragma once

#include <cstddef>
#include <span>

#include "base/simd/variants.hpp"
#include "session/kernels_table.hpp"
#include "session/layout.hpp"

namespace accelmgr::session {

using base::simd::Isa;

/// Destinations from this size on, if nobody reads them soon, are better written past the caches.
constexpr std::size_t non_temporal_from_bytes = std::size_t{4} << 20;

/// Elements of the master, and of slabs: those of the master, or bfloat16.
struct ElementTypes {
  Element master = Element::f32;
  SlabElement slab = SlabElement::same;
};

constexpr std::size_t slab_bytes_of(ElementTypes types) noexcept {
  return types.slab == SlabElement::bf16 ? 2 : bytes_of(types.master);
}

class Kernels {
 public:
  Kernels(Isa isa, const KernelTable* table) noexcept : isa_(isa), table_(table) {}
  Isa isa() const noexcept { return isa_; }

  /// master = sum * scale, or master = master + sum * scale, where sum = ((slab0 + slab1) + slab2) + ... of
  /// `count` elements; no slab: sum = 0, and accumulating leaves the master as it is. bfloat16 slabs are
  /// summed in float32. The master must not overlap a slab.
  void reduce(void* master, std::span<const void* const> slabs, std::size_t count, ElementTypes types,
              SumInto into, double scale = 1.0) const noexcept {
    table_->reduce[index(types.master)][index(types.slab)](master, slabs.data(), slabs.size(), count, scale,
                                                           into);
  }

  /// Copies a chunk of the master to its undo image: with 4 KiB chunks in the caches, at some 40% of what the
  /// C library's memcpy adds to the time of the reduction.
  void save(void* image, const void* chunk, std::size_t bytes) const noexcept {
    table_->save(image, chunk, bytes);
  }

  /// slab = gradient, whose elements are the master's; to bfloat16 by rounding to nearest even (from float64
  /// by way of float32); NaN stays NaN. Non-temporal when at least `non_temporal_from` bytes are written.
  /// True if every value stored is finite (a finite gradient beyond the range of bfloat16 is stored as
  /// infinity).
  bool take_over_copy(void* slab, const void* gradient, std::size_t count, ElementTypes types,
                      std::size_t non_temporal_from = non_temporal_from_bytes) const noexcept {
    const bool past_caches = count * slab_bytes_of(types) >= non_temporal_from;
    return take_over(slab, gradient, count, types,
                     past_caches ? TakeOver::copy_non_temporal : TakeOver::copy);
  }

  /// slab = slab + gradient, in float32 for a bfloat16 slab and rounded like a copy. True if every value
  /// stored is finite.
  bool take_over_add(void* slab, const void* gradient, std::size_t count, ElementTypes types) const noexcept {
    return take_over(slab, gradient, count, types, TakeOver::add);
  }

  /// Writes zeros, non-temporal from `non_temporal_from_bytes` on.
  void zero(void* begin, std::size_t bytes) const noexcept;

 private:
  template <class Enum>
  static constexpr std::size_t index(Enum value) noexcept {
    return static_cast<std::size_t>(value);
  }
  bool take_over(void* slab, const void* gradient, std::size_t count, ElementTypes types,
                 TakeOver how) const noexcept {
    return table_->take_over[index(types.master)][index(types.slab)](slab, gradient, count, how);
  }

  Isa isa_;
  const KernelTable* table_;
};

/// The fastest that this machine can run.
const Kernels& best_kernels() noexcept;

/// One variant; null when this machine or the compiler lacks it.
const Kernels* kernels(Isa isa) noexcept;

}  // namespace accelmgr::session
