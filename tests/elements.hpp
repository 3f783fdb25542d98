// The elements of parameters and gradients, whatever their dtype: how tests read and write them, and models
// that have all dtypes.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "engine/session/manifest.hpp"
#include "half_precision.hpp"

namespace accelmgr::test {

using session::Element;

/// As what an element is added.
inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
template <class Half>
float widen(Half value) {
  return from_half(value);
}
template <class Stored>
using SumOf = decltype(widen(Stored{}));

/// Rounds to nearest even, and to 16 bits by way of float32.
template <class Stored>
Stored narrow(double value) {
  if constexpr (sizeof(Stored) == 2) {
    return to_half<Stored>(static_cast<float>(value));
  } else {
    return static_cast<Stored>(value);
  }
}

/// Calls `use` with a value of the type as which the element is stored.
template <class Use>
void with_type(Element element, Use use) {
  switch (element) {
    case Element::f32:
      return use(float{});
    case Element::f64:
      return use(double{});
    case Element::bf16:
      return use(BFloat16{});
    case Element::f16:
      return use(Float16{});
  }
}

/// `count` elements in memory, as numbers.
class Elements {
 public:
  Elements(std::byte* begin, Element element, std::uint64_t count)
      : begin_(begin), element_(element), count_(count) {}
  std::uint64_t size() const { return count_; }

  double operator[](std::uint64_t i) const {
    double number = 0;
    with_type(element_, [&](auto stored) { number = widen(at<decltype(stored)>(i)); });
    return number;
  }
  void set(std::uint64_t i, double value) const {
    with_type(element_, [&](auto stored) { at<decltype(stored)>(i) = narrow<decltype(stored)>(value); });
  }
  std::vector<double> numbers() const {
    std::vector<double> out(count_);
    with_type(element_, [&](auto stored) {
      for (std::uint64_t i = 0; i < count_; ++i) out[i] = widen(at<decltype(stored)>(i));
    });
    return out;
  }
  void fill(double value) const {
    with_type(element_, [&](auto stored) {
      const auto filling = narrow<decltype(stored)>(value);
      for (std::uint64_t i = 0; i < count_; ++i) at<decltype(stored)>(i) = filling;
    });
  }
  /// Each element becomes change(it, i).
  template <class Change>
  void change(Change change) const {
    with_type(element_, [&](auto stored) {
      for (std::uint64_t i = 0; i < count_; ++i) {
        auto& element = at<decltype(stored)>(i);
        element = narrow<decltype(stored)>(change(double{widen(element)}, i));
      }
    });
  }

 private:
  template <class Stored>
  Stored& at(std::uint64_t i) const {
    return reinterpret_cast<Stored*>(begin_)[i];
  }
  std::byte* begin_;
  Element element_;
  std::uint64_t count_;
};

inline double rounded(Element element, double value) {
  with_type(element, [&](auto stored) { value = widen(narrow<decltype(stored)>(value)); });
  return value;
}

/// Parameters of all dtypes that can be trained, and of one that cannot; some are
/// frozen. `counts` has the number of values of one after the other, and begins again at its end.
inline session::Manifest mixed_manifest(const std::vector<std::uint64_t>& counts,
                                        const session::Precision& precision = {}) {
  using session::Group;
  struct Kind {
    DType dtype;
    Group group;
  };
  constexpr Kind kinds[]{{DType::float32, Group::decay},    {DType::bfloat16, Group::frozen},
                         {DType::bfloat16, Group::decay},   {DType::int8, Group::frozen},
                         {DType::float16, Group::no_decay}, {DType::complex64, Group::decay},
                         {DType::float64, Group::no_decay}, {DType::complex128, Group::decay},
                         {DType::float32, Group::frozen},   {DType::bfloat16, Group::no_decay}};
  session::Manifest manifest;
  for (const auto& [dtype, group] : kinds) {
    const auto i = manifest.tensors.size();
    const auto count = counts[i % counts.size()];
    manifest.tensors.push_back({.name = "p" + std::to_string(i),
                                .aliases = {},
                                .shape = {static_cast<std::int64_t>(count)},
                                .dtype = dtype,
                                .count = count,
                                .group = group});
  }
  manifest.set_precision(precision);
  manifest.place_tensors();
  return manifest;
}
/// The frozen bfloat16 parameter of a mixed manifest, which tests unfreeze.
constexpr std::size_t to_unfreeze = 1;

}  // namespace accelmgr::test
