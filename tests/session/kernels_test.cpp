#include "session/kernels.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace accelmgr::session {
namespace {

using Bytes = std::vector<unsigned char>;

constexpr ElementTypes all_types[] = {{Element::f32, SlabElement::same},
                                      {Element::f32, SlabElement::bf16},
                                      {Element::f64, SlabElement::same},
                                      {Element::f64, SlabElement::bf16}};
constexpr float infinity = std::numeric_limits<float>::infinity();

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
  Bytes content() { return {data(), data() + bytes_}; }
  bool surroundings_untouched() const {
    for (std::size_t i = 0; i < storage_.size(); ++i) {
      if ((i < begin_ || i >= begin_ + bytes_) && storage_[i] != 0xa5) return false;
    }
    return true;
  }

 private:
  Bytes storage_;
  std::size_t bytes_;
  std::size_t begin_ = 0;
};

float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

// Rounds to the nearer of the two neighbours, or to the even one if both are equally near.
std::uint16_t reference_bf16(float value) {
  const auto below = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  if (std::isnan(value)) return below | 0x40;
  if (from_bf16(below) == value) return below;
  const auto above = static_cast<std::uint16_t>(below + 1);  // The neighbour that is farther from zero.
  // 2^128 stands for infinity: it is the next value after the largest finite one.
  const double low = std::fabs(double{from_bf16(below)});
  const double high =
      std::isinf(from_bf16(above)) ? std::ldexp(1.0, 128) : std::fabs(double{from_bf16(above)});
  const double to_low = std::fabs(double{value}) - low, to_high = high - std::fabs(double{value});
  if (to_low != to_high) return to_low < to_high ? below : above;
  return below % 2 == 0 ? below : above;
}

class Generator {
 public:
  explicit Generator(unsigned seed) : engine_(seed) {}
  std::size_t below(std::size_t n) { return engine_() % n; }

  // Finite values of many magnitudes. Another order of additions, or a fused multiply-add, would change the
  // sum.
  double value() {
    const double mantissa = std::uniform_real_distribution<double>(-1, 1)(engine_);
    return std::ldexp(mantissa, static_cast<int>(below(24)) - 12);
  }
  void fill_masters(void* to, std::size_t count, Element element) {
    for (std::size_t i = 0; i < count; ++i) {
      if (element == Element::f32) {
        static_cast<float*>(to)[i] = static_cast<float>(value());
      } else {
        static_cast<double*>(to)[i] = value();
      }
    }
  }
  void fill_slab(void* to, std::size_t count, ElementTypes types) {
    if (types.slab == SlabElement::same) return fill_masters(to, count, types.master);
    for (std::size_t i = 0; i < count; ++i)
      static_cast<std::uint16_t*>(to)[i] = reference_bf16(static_cast<float>(value()));
  }

 private:
  std::mt19937 engine_;
};

template <class Master, class Slab>
Bytes reference_sum(const Bytes& master_before, const std::vector<const void*>& slabs, std::size_t count,
                    bool accumulate, double scale) {
  Bytes result = master_before;
  auto* master = reinterpret_cast<Master*>(result.data());
  const auto at = [&](std::size_t slab, std::size_t i) {
    if constexpr (std::is_same_v<Slab, std::uint16_t>) {
      return from_bf16(static_cast<const Slab*>(slabs[slab])[i]);
    } else {
      return static_cast<const Slab*>(slabs[slab])[i];
    }
  };
  for (std::size_t i = 0; i < count; ++i) {
    if (slabs.empty()) {
      if (!accumulate) master[i] = 0;
      continue;
    }
    auto sum = at(0, i);
    for (std::size_t slab = 1; slab < slabs.size(); ++slab) sum = sum + at(slab, i);
    Master scaled = static_cast<Master>(sum);
    if (scale != 1) scaled = scaled * static_cast<Master>(scale);
    master[i] = accumulate ? master[i] + scaled : scaled;
  }
  return result;
}

Bytes reference_sum(const Bytes& master_before, const std::vector<const void*>& slabs, std::size_t count,
                    ElementTypes types, bool accumulate, double scale) {
  const bool bf16 = types.slab == SlabElement::bf16;
  if (types.master == Element::f32) {
    return bf16 ? reference_sum<float, std::uint16_t>(master_before, slabs, count, accumulate, scale)
                : reference_sum<float, float>(master_before, slabs, count, accumulate, scale);
  }
  return bf16 ? reference_sum<double, std::uint16_t>(master_before, slabs, count, accumulate, scale)
              : reference_sum<double, double>(master_before, slabs, count, accumulate, scale);
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
  for (int round = 0; round < 1500; ++round) {
    const ElementTypes types = all_types[random.below(4)];
    const std::size_t element = bytes_of(types.master), slab_element = slab_bytes_of(types);
    const std::size_t count = random.below(round % 10 == 0 ? 3000 : 200);
    const auto into = static_cast<SumInto>(random.below(3));
    const double scale = random.below(2) == 0 ? 1.0 : 0.75 + random.value();

    Range master(count * element, random.below(2) == 0 ? 0 : random.below(64 / element) * element);
    random.fill_masters(master.data(), count, types.master);
    std::vector<Range> slabs;
    std::vector<const void*> addresses;
    for (std::size_t n = random.below(6); n > 0; --n) {
      slabs.emplace_back(count * slab_element,
                         random.below(2) == 0 ? 0 : random.below(64 / slab_element) * slab_element);
    }
    for (auto& slab : slabs) {
      random.fill_slab(slab.data(), count, types);
      addresses.push_back(slab.data());
    }
    const Bytes expected =
        reference_sum(master.content(), addresses, count, types, into == SumInto::accumulate, scale);

    variant->reduce(master.data(), addresses, count, types, into, scale);

    ASSERT_EQ(master.content(), expected)
        << "round " << round << ": " << count << " elements, " << slabs.size() << " slabs";
    ASSERT_TRUE(master.surroundings_untouched());
    for (auto& slab : slabs) ASSERT_TRUE(slab.surroundings_untouched());
  }
}

TEST_P(KernelsTest, WritesNonTemporallyToAddressesThatCannotBeAligned) {
  Generator random(2);
  std::vector<float> slab(100);
  random.fill_masters(slab.data(), slab.size(), Element::f32);
  Range master(400, 2);  // Not even aligned to the size of an element.
  const void* address = slab.data();
  variant->reduce(master.data(), {&address, 1}, 100, {}, SumInto::overwrite_non_temporal);
  EXPECT_EQ(std::memcmp(master.data(), slab.data(), 400), 0);
  EXPECT_TRUE(master.surroundings_untouched());
}

TEST_P(KernelsTest, KeepsInfinityAndNanInSums) {
  const std::vector<float> ones(40, 1.0f);
  std::vector<float> odd(40, 1.0f), master(40, 0.0f);
  odd[3] = infinity, odd[20] = -infinity, odd[39] = NAN;
  const void* slabs[] = {ones.data(), odd.data()};
  variant->reduce(master.data(), slabs, 40, {}, SumInto::accumulate);
  EXPECT_EQ(master[3], infinity);
  EXPECT_EQ(master[20], -infinity);
  EXPECT_TRUE(std::isnan(master[39]));
  EXPECT_EQ(master[38], 2.0f);
}

template <class Master>
void check_capture(const Kernels& variant, ElementTypes types, Generator& random) {
  const std::size_t count = random.below(300), element = slab_bytes_of(types);
  Range slab(count * element, random.below(64 / element) * element);
  Range gradient(count * sizeof(Master), random.below(64 / sizeof(Master)) * sizeof(Master));
  random.fill_masters(gradient.data(), count, types.master);
  const auto expected = [&](std::size_t i, bool add, const Bytes& before) -> Bytes {
    Bytes bits(element);
    const Master value = gradient.as<Master>()[i];
    if (types.slab == SlabElement::bf16) {
      std::uint16_t was;
      std::memcpy(&was, &before[2 * i], 2);
      const auto rounded =
          reference_bf16(add ? from_bf16(was) + static_cast<float>(value) : static_cast<float>(value));
      std::memcpy(bits.data(), &rounded, 2);
    } else {
      Master was;
      std::memcpy(&was, &before[sizeof was * i], sizeof was);
      const Master result = add ? was + value : value;
      std::memcpy(bits.data(), &result, sizeof result);
    }
    return bits;
  };
  const auto compare = [&](bool add, const Bytes& before) {
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_EQ(Bytes(slab.data() + i * element, slab.data() + (i + 1) * element), expected(i, add, before))
          << i;
    }
    ASSERT_TRUE(slab.surroundings_untouched());
  };
  Bytes before = slab.content();
  const std::size_t non_temporal_from = random.below(2) == 0 ? 0 : non_temporal_from_bytes;
  EXPECT_TRUE(variant.capture_copy(slab.data(), gradient.data(), count, types, non_temporal_from));
  compare(false, before);
  random.fill_masters(gradient.data(), count, types.master);
  before = slab.content();
  EXPECT_TRUE(variant.capture_add(slab.data(), gradient.data(), count, types));
  compare(true, before);
}

TEST_P(KernelsTest, TakesGradientsOverByCopyThenByAdding) {
  Generator random(3);
  for (int round = 0; round < 400 && !HasFatalFailure(); ++round) {
    const ElementTypes types = all_types[round % 4];
    if (types.master == Element::f32) {
      check_capture<float>(*variant, types, random);
    } else {
      check_capture<double>(*variant, types, random);
    }
  }
}

TEST_P(KernelsTest, RoundsToBfloat16ToNearestEven) {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000; high += 1) {
    for (std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  std::vector<std::uint16_t> slab(values.size());
  variant->capture_copy(slab.data(), values.data(), values.size(), {Element::f32, SlabElement::bf16});
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(slab[i], reference_bf16(values[i])) << values[i];
}

TEST_P(KernelsTest, TellsNonFiniteValuesWhereverTheyAre) {
  Generator random(4);
  for (const ElementTypes types : all_types) {
    const bool f32 = types.master == Element::f32;
    for (std::size_t count : {1u, 15u, 16u, 67u, 300u}) {
      for (const double bad : {double{infinity}, -double{infinity}, double{NAN}, -double{NAN}}) {
        const std::size_t where = random.below(count);
        std::vector<double> gradient(count, 1.0);
        const auto set = [&](double value) {
          if (f32) {
            std::vector<float> narrow(count, 1.0f);
            narrow[where] = static_cast<float>(value);
            std::memcpy(gradient.data(), narrow.data(), count * sizeof(float));
          } else {
            gradient[where] = value;
          }
        };
        std::vector<double> slab(count);
        set(bad);
        EXPECT_FALSE(variant->capture_copy(slab.data(), gradient.data(), count, types))
            << where << " of " << count;
        EXPECT_FALSE(variant->capture_copy(slab.data(), gradient.data(), count, types, 0))
            << where << " of " << count;
        EXPECT_FALSE(variant->finite(gradient.data(), count, types.master)) << where << " of " << count;
        set(1.0);
        EXPECT_TRUE(variant->finite(gradient.data(), count, types.master)) << count;
        EXPECT_FALSE(variant->capture_add(slab.data(), gradient.data(), count, types))
            << where << " of " << count;
        EXPECT_TRUE(variant->capture_copy(slab.data(), gradient.data(), count, types))
            << where << " of " << count;
        set(bad);
        EXPECT_FALSE(variant->capture_add(slab.data(), gradient.data(), count, types))
            << where << " of " << count;
      }
    }
  }
}

TEST_P(KernelsTest, TakesTheLargestFiniteValuesForFinite) {
  const std::vector<float> f32(20, std::numeric_limits<float>::max());
  const std::vector<double> f64(20, -std::numeric_limits<double>::max());
  std::vector<double> slab(20);
  EXPECT_TRUE(variant->capture_copy(slab.data(), f32.data(), 20, {Element::f32, SlabElement::same}));
  EXPECT_TRUE(variant->capture_copy(slab.data(), f64.data(), 20, {Element::f64, SlabElement::same}));
  EXPECT_TRUE(variant->finite(f32.data(), 20, Element::f32));
  EXPECT_TRUE(variant->finite(f64.data(), 20, Element::f64));
  const std::vector<float> largest_bf16(20, from_bf16(0x7f7f));
  EXPECT_TRUE(variant->capture_copy(slab.data(), largest_bf16.data(), 20, {Element::f32, SlabElement::bf16}));
}

TEST_P(KernelsTest, TellsOverflowOfWhatItStores) {
  const std::vector<float> f32(20, std::numeric_limits<float>::max());
  std::vector<float> slab = f32;
  EXPECT_FALSE(variant->capture_add(slab.data(), f32.data(), 20, {Element::f32, SlabElement::same}));
  EXPECT_FALSE(variant->capture_copy(slab.data(), f32.data(), 20, {Element::f32, SlabElement::bf16}));
}

TEST_P(KernelsTest, ZeroesExactlyTheRange) {
  for (std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{1000}, non_temporal_from_bytes + 77}) {
    for (std::size_t misalignment : {0u, 1u, 4u, 60u}) {
      Range range(bytes, misalignment);
      variant->zero(range.data(), bytes);
      EXPECT_EQ(range.content(), Bytes(bytes, 0)) << bytes << " bytes, " << misalignment << " misaligned";
      EXPECT_TRUE(range.surroundings_untouched());
    }
  }
}

TEST_P(KernelsTest, SavesExactlyTheRange) {
  Generator random(5);
  for (std::size_t bytes :
       {std::size_t{0}, std::size_t{4}, std::size_t{100}, std::size_t{4092}, chunk_bytes}) {
    Range image(bytes, 0), chunk(bytes, 4);
    random.fill_masters(chunk.data(), bytes / 4, Element::f32);
    variant->save(image.data(), chunk.data(), bytes);
    EXPECT_EQ(image.content(), chunk.content());
    EXPECT_TRUE(image.surroundings_untouched());
  }
}

TEST(BestKernels, AreAmongTheVariantsOfThisMachine) {
  EXPECT_EQ(kernels(best_kernels().isa()), &best_kernels());
  EXPECT_NE(kernels(Isa::portable), nullptr);
}

}  // namespace
}  // namespace accelmgr::session
