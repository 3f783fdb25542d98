// The kernels. Each variant (kernels_portable.cpp, kernels_avx2.cpp, kernels_avx512.cpp) includes this file
// once and compiles it for its instruction set. All names have internal linkage.
//
// A vector of the type in which master elements are added fills a register; all other vectors have the same
// number of lanes. float16 and bfloat16 are added as float32, and rounded once when they are stored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/simd/elements.hpp"
#include "base/simd/vectors.hpp"
#include "engine/session/kernels_table.hpp"

namespace accelmgr::session {
namespace {

using namespace base::simd;

/// `fixed` is the number of slabs if it is known at compile time, which keeps their addresses in registers.
/// 0: there are `slab_count`.
template <class Master, class Slab, std::size_t fixed, bool accumulate, bool past_caches>
void reduce_slabs(StoredOf<Master>* master, const void* const* slabs, std::size_t slab_count,
                  std::size_t count, ComputedOf<Master> scale) noexcept {
  constexpr std::size_t lanes = lanes_of<ComputedOf<Master>>;
  using MasterVector = Vector<ComputedOf<Master>, lanes>;
  using SumVector = Vector<ComputedOf<Slab>, lanes>;
  using Stored = StoredOf<Slab>;

  const Stored* begin[fixed == 0 ? 1 : fixed];
  for (std::size_t s = 0; s < fixed; ++s) begin[s] = static_cast<const Stored*>(slabs[s]);
  const auto slab = [&](std::size_t s) __attribute__((always_inline)) {
    if constexpr (fixed == 0) {
      return static_cast<const Stored*>(slabs[s]);
    } else {
      return begin[s];
    }
  };
  if constexpr (fixed != 0) slab_count = fixed;

  walk<sizeof(StoredOf<Master>), lanes, past_caches>(
      master, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        SumVector sum[vectors];
        for (std::size_t v = 0; v < vectors; ++v)
          sum[v] = load_as<Slab, lanes>(slab(0) + at + v * lanes, access);
        for (std::size_t s = 1; s < slab_count; ++s) {
          const Stored* next = slab(s) + at;
          for (std::size_t v = 0; v < vectors; ++v) sum[v] += load_as<Slab, lanes>(next + v * lanes, access);
        }
        for (std::size_t v = 0; v < vectors; ++v) {
          auto* to = master + at + v * lanes;
          MasterVector result = __builtin_convertvector(sum[v], MasterVector) * scale;  // Times 1 is exact.
          if constexpr (accumulate) result = load_as<Master, lanes>(to, access) + result;
          store_as<Master, lanes>(to, result, access);
        }
      });
}

template <class Master, class Slab, bool accumulate, bool past_caches>
void reduce_by_count(void* master, const void* const* slabs, std::size_t slab_count, std::size_t count,
                     ComputedOf<Master> scale) noexcept {
  auto* to = static_cast<StoredOf<Master>*>(master);
  switch (slab_count) {
    case 1:
      return reduce_slabs<Master, Slab, 1, accumulate, past_caches>(to, slabs, slab_count, count, scale);
    case 2:
      return reduce_slabs<Master, Slab, 2, accumulate, past_caches>(to, slabs, slab_count, count, scale);
    case 3:
      return reduce_slabs<Master, Slab, 3, accumulate, past_caches>(to, slabs, slab_count, count, scale);
    case 4:
      return reduce_slabs<Master, Slab, 4, accumulate, past_caches>(to, slabs, slab_count, count, scale);
    default:
      return reduce_slabs<Master, Slab, 0, accumulate, past_caches>(to, slabs, slab_count, count, scale);
  }
}

void zero_non_temporal(void* begin, std::size_t bytes) noexcept {
  auto* to = static_cast<char*>(begin);
  walk<1, vector_bytes, true>(
      to, bytes, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v)
          access.store(to + at + v * vector_bytes, Vector<char, vector_bytes>{});
      });
}

template <class Master, class Slab>
void reduce(void* master, const void* const* slabs, std::size_t slab_count, std::size_t count, double scale,
            SumInto into) noexcept {
  const auto s = static_cast<ComputedOf<Master>>(scale);
  if (slab_count == 0) {
    const auto bytes = count * sizeof(StoredOf<Master>);
    if (into == SumInto::overwrite) std::memset(master, 0, bytes);
    if (into == SumInto::overwrite_non_temporal) zero_non_temporal(master, bytes);
    return;
  }
  switch (into) {
    case SumInto::overwrite:
      return reduce_by_count<Master, Slab, false, false>(master, slabs, slab_count, count, s);
    case SumInto::overwrite_non_temporal:
      return reduce_by_count<Master, Slab, false, true>(master, slabs, slab_count, count, s);
    case SumInto::accumulate:
      return reduce_by_count<Master, Slab, true, false>(master, slabs, slab_count, count, s);
  }
}

template <class T>
using WordOf = std::conditional_t<sizeof(T) == 2, std::int16_t,
                                  std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>>;

/// The largest magnitude that each lane has had, as bits without the sign. As such bits, an infinity is above
/// all numbers and a NaN above an infinity.
template <class Element, std::size_t lanes>
class Largest {
 public:
  ACCELMGR_INLINE void note(Vector<StoredOf<Element>, lanes> v) {
    constexpr auto magnitude = std::numeric_limits<Word>::max();
    const auto bits = reinterpret_cast<Words>(v) & magnitude;
    largest_ = bits > largest_ ? bits : largest_;
  }
  double value() const {
    Word largest = 0;
    for (std::size_t lane = 0; lane < lanes; ++lane)
      largest = largest_[lane] > largest ? largest_[lane] : largest;
    using Stored = StoredOf<Element>;
    constexpr std::size_t sums = lanes_of<ComputedOf<Element>>;
    Stored stored;
    std::memcpy(&stored, &largest, sizeof stored);
    return double(Element::template widen<sums>(Vector<Stored, sums>{} + stored)[0]);
  }

 private:
  using Word = WordOf<StoredOf<Element>>;
  using Words = Vector<Word, lanes>;
  Words largest_{};
};

template <class Element>
double largest(const void* values, std::size_t count) noexcept {
  using Stored = StoredOf<Element>;
  constexpr std::size_t lanes = lanes_of<Stored>;
  const auto* from = static_cast<const Stored*>(values);
  Largest<Element, lanes> largest;
  walk<sizeof(Stored), lanes, false>(
      from, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v)
          largest.note(access.template load<Vector<Stored, lanes>>(from + at + v * lanes));
      });
  return largest.value();
}

/// The sum of squares, in double.
template <class Element>
double squares(const void* values, std::size_t count) noexcept {
  constexpr std::size_t lanes = lanes_of<ComputedOf<Element>>;
  using Doubles = Vector<double, lanes>;
  const auto* from = static_cast<const StoredOf<Element>*>(values);
  Doubles sums[unroll]{};
  walk<sizeof(StoredOf<Element>), lanes, false>(
      from, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v) {
          const auto value =
              __builtin_convertvector(load_as<Element, lanes>(from + at + v * lanes, access), Doubles);
          sums[v] += value * value;
        }
      });
  double total = 0;
  for (const auto& sum : sums)
    for (std::size_t lane = 0; lane < lanes; ++lane) total += sum[lane];
  return total;
}

/// Calls step(at, access) for each vector of the parameters: values are loaded and stored by UpdateOf's
/// functions.
template <class Parameter, class Gradient>
struct UpdateOf {
  using Number = ComputedOf<Parameter>;
  static_assert(std::is_same_v<Number, ComputedOf<Gradient>>);
  static constexpr std::size_t lanes = lanes_of<Number>;
  using Numbers = Vector<Number, lanes>;

  template <class Access>
  ACCELMGR_INLINE static Numbers load(const void* from, std::size_t at, Access access) {
    return load_as<Parameter, lanes>(static_cast<const StoredOf<Parameter>*>(from) + at, access);
  }
  template <class Access>
  ACCELMGR_INLINE static Numbers load_gradient(const void* from, std::size_t at, Access access) {
    return load_as<Gradient, lanes>(static_cast<const StoredOf<Gradient>*>(from) + at, access);
  }
  template <class Access>
  ACCELMGR_INLINE static void store(void* to, std::size_t at, Numbers numbers, Access access) {
    store_as<Parameter, lanes>(static_cast<StoredOf<Parameter>*>(to) + at, numbers, access);
  }
  template <class Step>
  ACCELMGR_INLINE static void for_each(const UpdateArrays& arrays, Step step) {
    walk<sizeof(StoredOf<Parameter>), lanes, false>(
        arrays.new_parameter,
        arrays.count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
          for (std::size_t v = 0; v < vectors; ++v) step(at + v * lanes, access);
        });
  }
};

/// With momentum 0 there is no first moment.
template <class Parameter, class Gradient>
void sgd(const UpdateArrays& arrays, const SgdFactors& factors) noexcept {
  using Of = UpdateOf<Parameter, Gradient>;
  using Number = typename Of::Number;
  const auto scale = Number(factors.gradient), decay = Number(factors.decay), step = Number(factors.step),
             momentum = Number(factors.momentum);
  Of::for_each(
      arrays, [&](std::size_t at, auto access) __attribute__((always_inline)) {
        const auto parameter = Of::load(arrays.parameter, at, access);
        auto gradient = Of::load_gradient(arrays.gradient, at, access) * scale + parameter * decay;
        if (momentum != 0) {
          const auto first = Of::load(arrays.first, at, access) * momentum + gradient;
          Of::store(arrays.new_first, at, first, access);
          gradient = factors.nesterov ? gradient + first * momentum : first;
        }
        Of::store(arrays.new_parameter, at, parameter - gradient * step, access);
      });
}

template <class Parameter, class Gradient>
void adam(const UpdateArrays& arrays, const AdamFactors& factors) noexcept {
  using Of = UpdateOf<Parameter, Gradient>;
  using Number = typename Of::Number;
  const auto scale = Number(factors.gradient), decay = Number(factors.decay), shrink = Number(factors.shrink),
             weight = Number(factors.first), beta2 = Number(factors.beta2),
             weight2 = Number(1 - factors.beta2), step = Number(factors.step),
             correction = Number(factors.correction), epsilon = Number(factors.epsilon);
  Of::for_each(
      arrays, [&](std::size_t at, auto access) __attribute__((always_inline)) {
        const auto parameter = Of::load(arrays.parameter, at, access);
        const auto gradient = Of::load_gradient(arrays.gradient, at, access) * scale + parameter * decay;
        const auto before = Of::load(arrays.first, at, access);
        const auto first = before + (gradient - before) * weight;
        const auto second = Of::load(arrays.second, at, access) * beta2 + gradient * gradient * weight2;
        Of::store(arrays.new_first, at, first, access);
        Of::store(arrays.new_second, at, second, access);
        const auto denominator = square_roots(second) / correction + epsilon;
        Of::store(arrays.new_parameter, at, parameter * shrink - first * step / denominator, access);
      });
}

template <class Gradient, class Slab, bool add, bool past_caches>
double capture_range(StoredOf<Slab>* slab, const StoredOf<Gradient>* gradient, std::size_t count) noexcept {
  constexpr std::size_t lanes = lanes_of<ComputedOf<Gradient>>;
  using Stored = Vector<StoredOf<Slab>, lanes>;
  Largest<Slab, lanes> largest;
  walk<sizeof(StoredOf<Slab>), lanes, past_caches>(
      slab, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v) {
          auto* to = slab + at + v * lanes;
          const auto* from = gradient + at + v * lanes;
          Stored stored;
          if constexpr (!add && std::is_same_v<Gradient, Slab>) {
            stored = access.template load<Stored>(from);
          } else {
            auto value = __builtin_convertvector(load_as<Gradient, lanes>(from, access),
                                                 Vector<ComputedOf<Slab>, lanes>);
            if constexpr (add) value = load_as<Slab, lanes>(to, access) + value;
            stored = Slab::template narrow<lanes>(value);
          }
          largest.note(stored);
          access.store(to, stored);
        }
      });
  return largest.value();
}

template <class Gradient, class Slab>
double capture(void* slab, const void* gradient, std::size_t count, CaptureMode how) noexcept {
  auto* to = static_cast<StoredOf<Slab>*>(slab);
  const auto* from = static_cast<const StoredOf<Gradient>*>(gradient);
  switch (how) {
    case CaptureMode::copy:
      return capture_range<Gradient, Slab, false, false>(to, from, count);
    case CaptureMode::copy_non_temporal:
      return capture_range<Gradient, Slab, false, true>(to, from, count);
    case CaptureMode::add:
      return capture_range<Gradient, Slab, true, false>(to, from, count);
  }
  return 0;
}

constexpr KernelTable table = {
    .reduce = {{reduce<f32, f32>, nullptr, reduce<f32, bf16>, reduce<f32, f16>},
               {nullptr, reduce<f64, f64>, reduce<f64, bf16>, nullptr},
               {nullptr, nullptr, reduce<bf16, bf16>, nullptr},
               {nullptr, nullptr, nullptr, reduce<f16, f16>}},
    .capture = {{capture<f32, f32>, nullptr, capture<f32, bf16>, nullptr},
                {nullptr, capture<f64, f64>, capture<f64, bf16>, nullptr},
                {nullptr, nullptr, capture<bf16, bf16>, nullptr},
                {nullptr, nullptr, nullptr, capture<f16, f16>}},
    .largest = {largest<f32>, largest<f64>, largest<bf16>, largest<f16>},
    .squares = {squares<f32>, squares<f64>, squares<bf16>, squares<f16>},
    .sgd = {{sgd<f32, f32>},
            {nullptr, sgd<f64, f64>},
            {sgd<bf16, f32>, nullptr, sgd<bf16, bf16>},
            {sgd<f16, f32>, nullptr, nullptr, sgd<f16, f16>}},
    .adam = {{adam<f32, f32>},
             {nullptr, adam<f64, f64>},
             {adam<bf16, f32>, nullptr, adam<bf16, bf16>},
             {adam<f16, f32>, nullptr, nullptr, adam<f16, f16>}},
    .round_to_bf16 = convert<f32, bf16, true>,
    .save = convert<Plain<char>, Plain<char>, false>,
    .zero_non_temporal = zero_non_temporal,
};

}  // namespace
}  // namespace accelmgr::session
