// The vectorized passes over gradients and parameters: summing slabs into the master, capturing a gradient
// into a slab, zeroing, updating, rounding.
//
// Every variant gives the same bits (payloads of NaN excepted): slabs are added in order, and no
// multiplication is contracted with an addition. Addresses need only the alignment of their elements; 64
// bytes are fastest. Thread-safe; no call blocks or throws. Non-temporal stores are fenced before a call
// returns.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

#include "base/simd/variants.hpp"
#include "engine/session/kernels_table.hpp"
#include "engine/session/layout.hpp"

namespace accelmgr::session {

using base::simd::Isa;

/// From this size on it is faster to write past the caches, if the destination is not read soon.
constexpr std::size_t non_temporal_from_bytes = std::size_t{4} << 20;

/// How the gradients of a parameter are stored. Master and slab have the same Element, with three exceptions:
/// a bf16 slab with an f32 or f64 master, and an f16 slab with an f32 master.
struct ElementTypes {
  Element master = Element::f32;
  Element slab = Element::f32;
  Element gradient = Element::f32;  ///< As replicas give it: the slab's; also f32 or f64 for a bf16 slab.
  bool operator==(const ElementTypes&) const = default;
};

constexpr double largest_finite(Element e) noexcept {
  constexpr double largest[]{std::numeric_limits<float>::max(), std::numeric_limits<double>::max(),
                             0x1.fep127, 65504};
  return largest[static_cast<std::size_t>(e)];
}

/// The range of a gradient in a slab, from its largest magnitude.
inline SumRange range_of(double magnitude, ElementTypes types) noexcept {
  if (!std::isfinite(magnitude)) return {HUGE_VAL, HUGE_VAL};
  return {magnitude / largest_finite(types.slab == Element::f64 ? Element::f64 : Element::f32),
          magnitude / largest_finite(types.master)};
}

class Kernels : public base::simd::Variant<KernelTable> {
 public:
  using Variant::Variant;

  /// Overwriting: master = sum * scale. Accumulating: master = master + sum * scale. Here sum = ((slab0 +
  /// slab1) + slab2) + ... over `count` elements. Without slabs, overwriting zeroes the master and
  /// accumulating leaves it unchanged. bfloat16 and float16 slabs are summed in float32; a master of these
  /// types is added in float32, too, and rounded once to nearest even.
  /// Requires: the master does not overlap a slab.
  void reduce(void* master, std::span<const void* const> slabs, std::size_t count, ElementTypes types,
              SumInto into, double scale = 1.0) const noexcept {
    table_->reduce[index(types.master)][index(types.slab)](master, slabs.data(), slabs.size(), count, scale,
                                                           into);
  }

  /// Copies a chunk of the master to its undo image. For 4 KiB in the caches it costs the reduction some 40%
  /// of what the C library's memcpy does.
  void save(void* image, const void* chunk, std::size_t bytes) const noexcept {
    table_->save(image, chunk, bytes);
  }

  /// slab = gradient. A bfloat16 slab rounds to nearest even (float64 by way of float32). NaN stays NaN. Uses
  /// non-temporal stores if at least `non_temporal_from` bytes are written. Returns the largest magnitude
  /// that is stored: infinite or NaN if a value is. A finite gradient beyond the range of bfloat16 is stored
  /// as infinity.
  double capture_copy(void* slab, const void* gradient, std::size_t count, ElementTypes types,
                      std::size_t non_temporal_from = non_temporal_from_bytes) const noexcept {
    const bool past_caches = count * bytes_of(types.slab) >= non_temporal_from;
    return capture(slab, gradient, count, types,
                   past_caches ? CaptureMode::copy_non_temporal : CaptureMode::copy);
  }

  /// slab = slab + gradient; a bfloat16 or float16 slab is added in float32 and rounded to nearest even.
  /// Returns what capture_copy() does.
  double capture_add(void* slab, const void* gradient, std::size_t count, ElementTypes types) const noexcept {
    return capture(slab, gradient, count, types, CaptureMode::add);
  }

  /// For a gradient that a device copied into the slab: its largest magnitude, infinite or NaN if a value is.
  double largest(const void* values, std::size_t count, Element element) const noexcept {
    return table_->largest[index(element)](values, count);
  }

  /// The sum of the squares, added in double.
  double squares(const void* values, std::size_t count, Element element) const noexcept {
    return table_->squares[index(element)](values, count);
  }

  /// The new values of a piece of a parameter and of its moments. They are computed in float64 or float32, as
  /// the dtypes of gradient and parameter say, and rounded once.
  /// Requires: the new places do not overlap the others.
  void sgd(const UpdateArrays& arrays, const SgdFactors& factors, Element parameter,
           Element gradient) const noexcept {
    table_->sgd[index(parameter)][index(gradient)](arrays, factors);
  }
  void adam(const UpdateArrays& arrays, const AdamFactors& factors, Element parameter,
            Element gradient) const noexcept {
    table_->adam[index(parameter)][index(gradient)](arrays, factors);
  }

  /// Copies float32 as bfloat16, rounded as in capture_copy(). Uses non-temporal stores.
  void round_to_bf16(void* to, const void* from, std::size_t count) const noexcept {
    table_->round_to_bf16(to, from, count);
  }

  /// Writes zeros, with non-temporal stores from `non_temporal_from_bytes` on.
  void zero(void* begin, std::size_t bytes) const noexcept;

 private:
  template <class Enum>
  static constexpr std::size_t index(Enum value) noexcept {
    return static_cast<std::size_t>(value);
  }
  double capture(void* slab, const void* gradient, std::size_t count, ElementTypes types,
                 CaptureMode how) const noexcept {
    return table_->capture[index(types.gradient)][index(types.slab)](slab, gradient, count, how);
  }
};

/// The fastest variant that this machine can run.
const Kernels& best_kernels() noexcept;

/// The variant of an instruction set; null if the machine or the compiler lacks it.
const Kernels* kernels(Isa isa) noexcept;

}  // namespace accelmgr::session
