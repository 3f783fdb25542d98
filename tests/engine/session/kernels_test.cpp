#include "engine/session/kernels.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "elements.hpp"

namespace accelmgr::session {
namespace {

using test::BFloat16;
using test::Float16;
using test::narrow;
using test::SumOf;
using test::widen;
using test::with_type;
using Content = std::vector<unsigned char>;

// Master, slab, gradient.
constexpr ElementTypes all_types[] = {
    {Element::f32, Element::f32, Element::f32},    {Element::f32, Element::bf16, Element::f32},
    {Element::f32, Element::bf16, Element::bf16},  {Element::f32, Element::f16, Element::f16},
    {Element::f64, Element::f64, Element::f64},    {Element::f64, Element::bf16, Element::f64},
    {Element::bf16, Element::bf16, Element::bf16}, {Element::f16, Element::f16, Element::f16}};
constexpr float infinity = std::numeric_limits<float>::infinity();

template <class Stored>
bool is_same(Stored a, Stored b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(widen(a)) && std::isnan(widen(b)));
}

// A buffer at any misalignment, with filled guard bytes that a kernel must not touch.
class Range {
 public:
  static constexpr std::size_t guard = 128;

  Range(std::size_t bytes, std::size_t misalignment) : storage_(bytes + 3 * guard, 0xa5), bytes_(bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    begin_ = guard + (guard - address % guard) % guard + misalignment;
  }
  unsigned char* data() { return storage_.data() + begin_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  Content content() { return {data(), data() + bytes_}; }
  bool surroundings_untouched() const {
    for (std::size_t i = 0; i < storage_.size(); ++i) {
      if ((i < begin_ || i >= begin_ + bytes_) && storage_[i] != 0xa5) return false;
    }
    return true;
  }

 private:
  Content storage_;
  std::size_t bytes_;
  std::size_t begin_ = 0;
};

class Generator {
 public:
  explicit Generator(unsigned seed) : engine_(seed) {}
  std::size_t below(std::size_t n) { return engine_() % n; }

  /// Mostly around a multiple of the lanes of vectors.
  std::size_t count() {
    if (below(20) == 0) return below(3000);
    const auto near = 8 * below(40) + below(5);
    return near < 2 ? 0 : near - 2;
  }
  std::size_t misalignment(std::size_t element) { return below(2) == 0 ? 0 : below(64 / element) * element; }

  // Finite values of many magnitudes. Another order of additions, or a fused multiply-add, would change the
  // sum.
  double value() {
    const double mantissa = std::uniform_real_distribution<double>(-1, 1)(engine_);
    return std::ldexp(mantissa, static_cast<int>(below(24)) - 12);
  }
  void fill(void* to, std::size_t count, Element element) {
    with_type(element, [&](auto stored) {
      for (std::size_t i = 0; i < count; ++i)
        static_cast<decltype(stored)*>(to)[i] =
            narrow<decltype(stored)>(static_cast<SumOf<decltype(stored)>>(value()));
    });
  }
  /// Any bits: subnormal, huge, infinite and NaN. In many places, or in a few.
  void fill_wild(void* to, std::size_t count, Element element) {
    fill(to, count, element);
    constexpr float edges[]{infinity, -infinity,  NAN,       65504,   -65504,      65520,
                            0x1p-25F, 0x1.8p-25F, 0x1p-140F, 3.4e38F, 0x1.fep127F, -0x1.fffffep127F};
    const std::size_t most = below(2) == 0 ? 3 : 2 * count + 1, first = below(most);
    with_type(element, [&](auto stored) {
      auto* values = static_cast<decltype(stored)*>(to);
      for (std::size_t i = first; i < count; i += 1 + below(most)) {
        const std::uint64_t bits = std::uint64_t{engine_()} << 32 | engine_();
        std::memcpy(&values[i], &bits, sizeof stored);
        if (most > 3 || below(2) == 0) values[i] = narrow<decltype(stored)>(edges[below(std::size(edges))]);
      }
    });
  }

 private:
  std::mt19937 engine_;
};

template <class Master, class Slab>
void reference_sum(Master* master, const std::vector<const void*>& slabs, std::size_t count, bool accumulate,
                   double scale) {
  const auto at = [&](std::size_t slab, std::size_t i) {
    return widen(static_cast<const Slab*>(slabs[slab])[i]);
  };
  for (std::size_t i = 0; i < count; ++i) {
    if (slabs.empty()) {
      if (!accumulate) master[i] = Master{};
      continue;
    }
    auto sum = at(0, i);
    for (std::size_t slab = 1; slab < slabs.size(); ++slab) sum = sum + at(slab, i);
    auto scaled = static_cast<SumOf<Master>>(sum);
    if (scale != 1) scaled = scaled * static_cast<SumOf<Master>>(scale);
    master[i] = narrow<Master>(accumulate ? widen(master[i]) + scaled : scaled);
  }
}

/// The first element that differs, or `count`.
std::size_t first_difference(const void* a, const void* b, std::size_t count, Element element) {
  std::size_t first = 0;
  with_type(element, [&](auto stored) {
    const auto* one = static_cast<const decltype(stored)*>(a);
    const auto* other = static_cast<const decltype(stored)*>(b);
    while (first < count && is_same(one[first], other[first])) ++first;
  });
  return first;
}

// Runs with every variant of the kernels that this machine supports.
class KernelsTest : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    variant = kernels(GetParam());
    if (variant == nullptr) GTEST_SKIP() << "this machine has no " << to_string(GetParam());
  }
  const Kernels* variant = nullptr;
};

INSTANTIATE_TEST_SUITE_P(, KernelsTest, testing::Values(Isa::portable, Isa::avx2, Isa::avx512),
                         [](const auto& info) {
                           return std::string(info.param == Isa::portable ? "Portable"
                                              : info.param == Isa::avx2   ? "Avx2"
                                                                          : "Avx512");
                         });

TEST_P(KernelsTest, ReducesInTheOrderOfTheSlabsBitForBit) {
  Generator random(1);
  for (int round = 0; round < 3000; ++round) {
    const ElementTypes types = all_types[random.below(std::size(all_types))];
    const std::size_t element = bytes_of(types.master), slab_element = bytes_of(types.slab);
    const std::size_t count = random.count();
    const auto into = static_cast<SumInto>(random.below(3));
    const double scale = random.below(2) == 0 ? 1.0 : 0.75 + random.value();
    const auto fill = [&](void* to, Element of) {
      round % 2 == 0 ? random.fill(to, count, of) : random.fill_wild(to, count, of);
    };

    Range master(count * element, random.misalignment(element));
    fill(master.data(), types.master);
    std::vector<Range> slabs;
    std::vector<const void*> addresses;
    for (std::size_t n = random.below(6); n > 0; --n)
      slabs.emplace_back(count * slab_element, random.misalignment(slab_element));
    for (auto& slab : slabs) {
      fill(slab.data(), types.slab);
      addresses.push_back(slab.data());
    }
    Content expected = master.content();
    with_type(types.master, [&](auto of_master) {
      with_type(types.slab, [&](auto of_slab) {
        reference_sum<decltype(of_master), decltype(of_slab)>(
            reinterpret_cast<decltype(of_master)*>(expected.data()), addresses, count,
            into == SumInto::accumulate, scale);
      });
    });

    variant->reduce(master.data(), addresses, count, types, into, scale);

    ASSERT_EQ(first_difference(master.data(), expected.data(), count, types.master), count)
        << "round " << round << ": " << slabs.size() << " slabs";
    ASSERT_TRUE(master.surroundings_untouched());
    for (auto& slab : slabs) ASSERT_TRUE(slab.surroundings_untouched());
  }
}

// Every number of 16 bits, to which others are added.
template <class Half>
void check_rounding_of_sums(const Kernels& variant, Element element) {
  constexpr std::size_t count = 0x10000;
  std::vector<Half> all(count), others(count), master(count), expected(count);
  for (std::size_t i = 0; i < count; ++i) all[i].bits = static_cast<std::uint16_t>(i);
  for (const std::uint16_t distance : {0, 1, 0x280, 0x500, 0x2c00, 0x8000, 0xabcd}) {
    for (std::size_t i = 0; i < count; ++i) others[i].bits = static_cast<std::uint16_t>(i + distance);
    const std::vector<const void*> slabs{all.data(), others.data()};
    for (const double scale : {1.0, 0.3}) {
      reference_sum<Half, Half>(expected.data(), slabs, count, false, scale);
      variant.reduce(master.data(), slabs, count, {element, element, element}, SumInto::overwrite, scale);
      const auto first = first_difference(master.data(), expected.data(), count, element);
      ASSERT_EQ(first, count) << widen(all[first]) << " and " << widen(others[first]);
    }
  }
}

TEST_P(KernelsTest, RoundsSumsOf16BitsOnceAndToNearestEven) {
  check_rounding_of_sums<BFloat16>(*variant, Element::bf16);
  check_rounding_of_sums<Float16>(*variant, Element::f16);
}

TEST_P(KernelsTest, WritesNonTemporallyToAddressesThatCannotBeAligned) {
  Generator random(2);
  for (const auto element : {Element::f32, Element::f64, Element::bf16, Element::f16}) {
    const auto bytes = 100 * bytes_of(element);
    Content slab(bytes);
    random.fill(slab.data(), 100, element);
    Range master(bytes, bytes_of(element) / 2);  // Not even aligned to the size of an element.
    const void* address = slab.data();
    variant->reduce(master.data(), {&address, 1}, 100, {element, element, element},
                    SumInto::overwrite_non_temporal);
    EXPECT_EQ(master.content(), slab);
    EXPECT_TRUE(master.surroundings_untouched());
  }
}

template <class Gradient, class Slab>
void check_capture(const Kernels& variant, ElementTypes types, Generator& random, bool wild) {
  const std::size_t count = random.count();
  Range slab(count * sizeof(Slab), random.misalignment(sizeof(Slab)));
  Range gradient(count * sizeof(Gradient), random.misalignment(sizeof(Gradient)));
  const auto capture = [&](bool add) {
    wild ? random.fill_wild(gradient.data(), count, types.gradient)
         : random.fill(gradient.data(), count, types.gradient);
    auto expected = slab.content();
    double largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
      auto& to = reinterpret_cast<Slab*>(expected.data())[i];
      const auto value = static_cast<SumOf<Slab>>(widen(gradient.as<Gradient>()[i]));
      to = narrow<Slab>(add ? widen(to) + value : value);
      const double magnitude = std::abs(double(widen(to)));
      if (!std::isnan(largest) && !(magnitude <= largest)) largest = magnitude;  // NaN is the largest.
    }
    const std::size_t non_temporal_from = random.below(2) == 0 ? 0 : non_temporal_from_bytes;
    const double told =
        add ? variant.capture_add(slab.data(), gradient.data(), count, types)
            : variant.capture_copy(slab.data(), gradient.data(), count, types, non_temporal_from);
    EXPECT_TRUE(is_same(told, largest)) << told << " is not " << largest;
    ASSERT_EQ(first_difference(slab.data(), expected.data(), count, types.slab), count);
    ASSERT_TRUE(is_same(variant.largest(slab.data(), count, types.slab), largest)) << largest;
    ASSERT_TRUE(slab.surroundings_untouched());
    ASSERT_TRUE(gradient.surroundings_untouched());
  };
  capture(false);
  capture(true);
}

TEST_P(KernelsTest, TakesGradientsOverByCopyThenByAdding) {
  Generator random(3);
  for (int round = 0; round < 1600 && !HasFatalFailure(); ++round) {
    const ElementTypes types = all_types[std::size_t(round) % std::size(all_types)];
    const bool wild = round % 16 >= 8;
    SCOPED_TRACE(round);
    with_type(types.gradient, [&](auto gradient) {
      with_type(types.slab, [&](auto slab) {
        check_capture<decltype(gradient), decltype(slab)>(*variant, types, random, wild);
      });
    });
  }
}

/// All bfloat16 numbers, their neighbours in float32, and what lies between two of them.
std::vector<float> around_bf16() {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000; high += 1) {
    for (std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  return values;
}
/// A NaN keeps its sign and its high bits.
std::uint16_t reference_bf16(float value) {
  if (std::isnan(value)) return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16 | 0x40);
  return test::to_half<BFloat16>(value).bits;
}

TEST_P(KernelsTest, RoundsToBfloat16ToNearestEven) {
  const auto values = around_bf16();
  std::vector<std::uint16_t> slab(values.size()), parameters(values.size());
  variant->capture_copy(slab.data(), values.data(), values.size(),
                        {Element::f32, Element::bf16, Element::f32});
  variant->round_to_bf16(parameters.data(), values.data(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(slab[i], reference_bf16(values[i])) << values[i];
  EXPECT_EQ(parameters, slab);
}

TEST_P(KernelsTest, RoundsExactlyTheRange) {
  Generator random(6);
  for (int round = 0; round < 300; ++round) {
    const auto count = random.count();
    Range from(count * 4, random.misalignment(4)), to(count * 2, random.misalignment(2));
    random.fill_wild(from.data(), count, Element::f32);
    variant->round_to_bf16(to.data(), from.data(), count);
    for (std::size_t i = 0; i < count; ++i)
      ASSERT_EQ(to.as<std::uint16_t>()[i], reference_bf16(from.as<float>()[i]));
    ASSERT_TRUE(to.surroundings_untouched());
  }
}

TEST_P(KernelsTest, ZeroesExactlyTheRange) {
  for (std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{1000}, non_temporal_from_bytes + 77}) {
    for (std::size_t misalignment : {0u, 1u, 4u, 60u}) {
      Range range(bytes, misalignment);
      variant->zero(range.data(), bytes);
      EXPECT_EQ(range.content(), Content(bytes, 0)) << bytes << " bytes, " << misalignment << " misaligned";
      EXPECT_TRUE(range.surroundings_untouched());
    }
  }
}

TEST_P(KernelsTest, SavesExactlyTheRange) {
  Generator random(5);
  for (std::size_t bytes :
       {std::size_t{0}, std::size_t{4}, std::size_t{100}, std::size_t{4092}, chunk_bytes}) {
    Range image(bytes, 0), chunk(bytes, 4);
    random.fill(chunk.data(), bytes / 4, Element::f32);
    variant->save(image.data(), chunk.data(), bytes);
    EXPECT_EQ(image.content(), chunk.content());
    EXPECT_TRUE(image.surroundings_untouched());
  }
}

// Of others the table has no kernels.
// Parameter, gradient.
constexpr std::pair<Element, Element> updated_types[] = {
    {Element::f32, Element::f32},  {Element::f64, Element::f64}, {Element::bf16, Element::bf16},
    {Element::bf16, Element::f32}, {Element::f16, Element::f16}, {Element::f16, Element::f32}};

/// The arrays of an update, with random values.
struct Updated {
  Updated(Generator& random, std::size_t n, Element parameter, Element gradient_type)
      : count(n),
        gradient(n * bytes_of(gradient_type), random.misalignment(bytes_of(gradient_type))),
        before{range(random, parameter), range(random, parameter), range(random, parameter)},
        after{range(random, parameter), range(random, parameter), range(random, parameter)} {
    random.fill(gradient.data(), n, gradient_type);
    for (auto& values : before) random.fill(values.data(), n, parameter);
    test::Elements(reinterpret_cast<std::byte*>(before[2].data()), parameter, n)
        .change([](double value, std::uint64_t) { return std::abs(value); });
  }
  Range range(Generator& random, Element element) const {
    return {count * bytes_of(element), random.misalignment(bytes_of(element))};
  }
  UpdateArrays arrays() {
    return {gradient.data(), before[0].data(), before[1].data(), before[2].data(),
            after[0].data(), after[1].data(),  after[2].data(),  count};
  }

  std::size_t count;
  Range gradient;
  std::array<Range, 3> before, after;  ///< Parameter, first and second moment.
};

/// Calls check(parameter, gradient, first, second, i) with values as they are computed with, and expects its
/// three results in the arrays, rounded.
template <class Reference>
void expect_updates(Updated& updated, Element type, Element gradient_type, int arrays, Reference reference) {
  with_type(type, [&](auto stored) {
    using Stored = decltype(stored);
    using Number = SumOf<Stored>;
    with_type(gradient_type, [&](auto gradient) {
      using Gradient = decltype(gradient);
      if constexpr (std::is_same_v<Number, SumOf<Gradient>>) {
        for (std::size_t i = 0; i < updated.count; ++i) {
          const auto at = [&](int array) {
            return widen(updated.before[std::size_t(array)].template as<Stored>()[i]);
          };
          const std::array<Number, 3> expected =
              reference(at(0), widen(updated.gradient.template as<Gradient>()[i]), at(1), at(2));
          for (int array = 0; array < arrays; ++array)
            ASSERT_TRUE(is_same(updated.after[std::size_t(array)].template as<Stored>()[i],
                                narrow<Stored>(expected[std::size_t(array)])))
                << "array " << array << ", element " << i << " of " << updated.count;
        }
      }
    });
  });
  for (auto& range : updated.after) EXPECT_TRUE(range.surroundings_untouched());
}

TEST_P(KernelsTest, UpdatesWithAdamBitForBit) {
  Generator random(11);
  const AdamFactors factors{.gradient = 0.3,
                            .decay = 0.01,
                            .shrink = 0.999,
                            .first = 0.1,
                            .beta2 = 0.99,
                            .step = 0.02,
                            .correction = 0.7,
                            .epsilon = 1e-3};
  for (const auto& [type, gradient_type] : updated_types)
    for (int round = 0; round < 40; ++round) {
      Updated updated(random, random.count(), type, gradient_type);
      variant->adam(updated.arrays(), factors, type, gradient_type);
      expect_updates(updated, type, gradient_type, 3, [&](auto p, auto g, auto m, auto v) {
        using N = decltype(p);
        g = g * N(factors.gradient) + p * N(factors.decay);
        m = m + (g - m) * N(factors.first);
        v = v * N(factors.beta2) + g * g * N(1 - factors.beta2);
        p = p * N(factors.shrink) -
            m * N(factors.step) / (std::sqrt(v) / N(factors.correction) + N(factors.epsilon));
        return std::array<N, 3>{p, m, v};
      });
    }
}

TEST_P(KernelsTest, UpdatesWithSgdBitForBit) {
  Generator random(12);
  for (const auto& [type, gradient_type] : updated_types)
    for (const double momentum : {0.0, 0.9})
      for (const bool nesterov : {false, true}) {
        const SgdFactors factors{
            .gradient = 0.3, .decay = 0.01, .momentum = momentum, .step = 0.02, .nesterov = nesterov};
        Updated updated(random, 500 + random.count(), type, gradient_type);
        variant->sgd(updated.arrays(), factors, type, gradient_type);
        expect_updates(updated, type, gradient_type, momentum == 0 ? 1 : 2,
                       [&](auto p, auto g, auto m, auto) {
                         using N = decltype(p);
                         g = g * N(factors.gradient) + p * N(factors.decay);
                         if (momentum != 0) m = m * N(momentum) + g;
                         if (momentum != 0) g = nesterov ? g + m * N(momentum) : m;
                         return std::array<N, 3>{p - g * N(factors.step), m, N(0)};
                       });
      }
}

TEST_P(KernelsTest, AddsSquaresInDouble) {
  Generator random(13);
  for (const auto element : {Element::f32, Element::f64, Element::bf16, Element::f16})
    for (int round = 0; round < 40; ++round) {
      const auto count = random.count();
      Range values(count * bytes_of(element), random.misalignment(bytes_of(element)));
      random.fill(values.data(), count, element);
      double expected = 0;
      for (const auto value :
           test::Elements(reinterpret_cast<std::byte*>(values.data()), element, count).numbers())
        expected += value * value;
      EXPECT_NEAR(variant->squares(values.data(), count, element), expected, 1e-12 * expected);
    }
  const std::vector<float> many(3'000'000, 0.1F);
  EXPECT_NEAR(variant->squares(many.data(), many.size(), Element::f32), 3e6 * double(0.1F) * double(0.1F),
              1e-6);
}

TEST(ElementTypes, OfEveryParameterAreAmongThoseThatAreTested) {
  for (std::size_t dtype = 0; dtype < dtype_count; ++dtype)
    for (unsigned bits = 0; bits < 8; ++bits) {
      Manifest manifest;
      auto& tensor = manifest.tensors.emplace_back();
      tensor.dtype = static_cast<DType>(dtype);
      if (!element_of(tensor.dtype)) continue;
      manifest.set_precision({(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0});
      EXPECT_NE(std::ranges::find(all_types, tensor.types), std::end(all_types))
          << name_of(tensor.dtype) << ", precision " << bits;
    }
}

}  // namespace
}  // namespace accelmgr::session
