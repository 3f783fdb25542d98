#include "launcher/collective/kernels/kernels.hpp"

#include <gtest/gtest.h>

#include <random>

#include "launcher/contract/collective/call.hpp"
#include "oracle.hpp"

namespace accelmgr::collective {
namespace {

using namespace test;
using Bytes = std::vector<unsigned char>;

constexpr std::size_t most_inputs = 5;

// A buffer at any misalignment. A filler around it shows whether a kernel wrote where it must not.
class Range {
 public:
  Range(std::size_t bytes, std::size_t misalignment) : storage_(bytes + 3 * guard, filler), bytes_(bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    begin_ = guard + (guard - address % guard) % guard + misalignment;
  }
  unsigned char* data() { return storage_.data() + begin_; }
  bool surroundings_untouched() const {
    for (std::size_t i = 0; i < storage_.size(); ++i)
      if ((i < begin_ || i >= begin_ + bytes_) && storage_[i] != filler) return false;
    return true;
  }

 private:
  static constexpr std::size_t guard = 128;
  static constexpr unsigned char filler = 0xa5;
  Bytes storage_;
  std::size_t bytes_;
  std::size_t begin_ = 0;
};

template <class T>
T floating(std::mt19937_64& random) {
  constexpr T specials[] = {T(0),
                            -T(0),
                            std::numeric_limits<T>::infinity(),
                            -std::numeric_limits<T>::infinity(),
                            std::numeric_limits<T>::quiet_NaN(),
                            std::numeric_limits<T>::denorm_min(),
                            std::numeric_limits<T>::max(),
                            T(65519.9),
                            T(1e-7)};
  if (random() % 8 == 0) return specials[random() % std::size(specials)];
  return static_cast<T>(static_cast<double>(static_cast<std::int64_t>(random())) / 1e17);
}

template <class T>
T element(std::mt19937_64& random) {
  if constexpr (std::is_same_v<T, bool>)
    return random() % 2 != 0;
  else if constexpr (std::is_integral_v<T>)
    return static_cast<T>(random());
  else if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>)
    return random() % 2 == 0 ? to_half<T>(floating<float>(random)) : T{static_cast<std::uint16_t>(random())};
  else if constexpr (is_complex<T>)
    return {floating<typename T::value_type>(random), floating<typename T::value_type>(random)};
  else
    return floating<T>(random);
}

Bytes elements(DType dtype, std::size_t count, std::mt19937_64& random) {
  Bytes bytes(count * size_of(dtype));
  with_type(dtype, [&](auto type) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto value = element<decltype(type)>(random);
      std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
    }
  });
  return bytes;
}

class EachIsa : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    kernels_ = kernels(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this machine has no " << to_string(GetParam());
  }
  const Kernels* kernels_ = nullptr;
};

struct Case {
  std::size_t inputs;
  std::size_t count;
  std::size_t misalignment;
  Stores stores;
  bool in_place;
};

constexpr Case cases[] = {
    {1, 67, 0, Stores::cached, false},           {2, 0, 0, Stores::cached, false},
    {2, 1, 0, Stores::past_caches, true},        {2, 1031, 0, Stores::cached, true},
    {3, 515, 16, Stores::past_caches, false},    {3, 130, 1, Stores::past_caches, false},
    {most_inputs, 301, 3, Stores::cached, true},
};

TEST_P(EachIsa, ReducesAsTheDefinitionSays) {
  std::mt19937_64 random(1);
  for (const auto dtype : contract::all_dtypes)
    for (const auto op : contract::all_ops) {
      if (!contract::makes_sense(dtype, op)) continue;
      for (const auto& c : cases) {
        std::vector<Bytes> given;
        std::vector<Range> ranges;
        std::vector<const void*> inputs;
        std::vector<const unsigned char*> for_oracle;
        for (std::size_t i = 0; i < c.inputs; ++i) {
          given.push_back(elements(dtype, c.count, random));
          ranges.emplace_back(given[i].size(), c.misalignment * i);
          if (!given[i].empty()) std::memcpy(ranges[i].data(), given[i].data(), given[i].size());
        }
        for (std::size_t i = 0; i < c.inputs; ++i) {
          inputs.push_back(ranges[i].data());
          for_oracle.push_back(given[i].data());
        }
        Bytes expected(c.count * size_of(dtype));
        Range separate(expected.size(), c.misalignment);
        Range& out = c.in_place ? ranges.back() : separate;
        kernels_->reduce(dtype, op, inputs, out.data(), c.count, c.inputs, c.stores);
        const bool same = with_type(dtype, [&](auto type) {
          using T = decltype(type);
          reduce_elements<T>(op, for_oracle, expected.data(), c.count, c.inputs);
          return same_elements<T>(expected.data(), out.data(), c.count);
        });
        EXPECT_TRUE(same && out.surroundings_untouched())
            << name_of(op) << " of " << name_of(dtype) << ", " << c.inputs << " inputs of " << c.count;
      }
    }
}

TEST_P(EachIsa, NormalizesBooleans) {
  const Bytes in(100, 2);
  Bytes out(100, 7);
  const void* inputs[] = {in.data(), in.data()};
  for (const auto op : {ReduceOp::sum, ReduceOp::product, ReduceOp::bit_and, ReduceOp::max}) {
    kernels_->reduce(DType::boolean, op, inputs, out.data(), out.size());
    EXPECT_EQ(out, Bytes(100, 1)) << name_of(op);
  }
}

template <class Half>
void expect_conversions(const Kernels& kernels, DType dtype) {
  std::vector<Half> all;
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) all.push_back({static_cast<std::uint16_t>(bits)});
  std::vector<float> wide(all.size());
  kernels.widen(dtype, all.data(), wide.data(), all.size());
  for (std::size_t i = 0; i < all.size(); ++i)
    ASSERT_TRUE(same_elements<float>(
        reinterpret_cast<const unsigned char*>(&wide[i]),
        reinterpret_cast<const unsigned char*>(std::vector<float>{from_half(all[i])}.data()), 1))
        << i;
  // Every third number, the middle between it and the next one, and the two neighbours of that middle.
  std::vector<float> values;
  for (std::size_t i = 0; i < all.size(); i += 3) {
    const float here = from_half(all[i]);
    const float next = from_half(Half{static_cast<std::uint16_t>(all[i].bits + 1)});
    const float middle = here / 2 + next / 2;
    for (const float value : {here, middle, std::nextafter(middle, here), std::nextafter(middle, next)})
      values.push_back(value);
  }
  std::vector<Half> narrow(values.size());
  kernels.narrow(dtype, values.data(), narrow.data(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto expected = to_half<Half>(values[i]);
    if (std::isnan(values[i]))
      ASSERT_TRUE(std::isnan(from_half(narrow[i]))) << i;
    else
      ASSERT_EQ(narrow[i].bits, expected.bits) << values[i];
  }
}

TEST_P(EachIsa, RoundsHalvesToTheNearest) {
  expect_conversions<Float16>(*kernels_, DType::float16);
  expect_conversions<BFloat16>(*kernels_, DType::bfloat16);
}

TEST_P(EachIsa, CopiesPastTheCaches) {
  for (const std::size_t misalignment : {0, 1, 32}) {
    Bytes in(5000);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<unsigned char>(i * 7);
    Range out(in.size(), misalignment);
    kernels_->copy(out.data(), in.data(), in.size(), Stores::past_caches);
    EXPECT_EQ(Bytes(out.data(), out.data() + in.size()), in);
    EXPECT_TRUE(out.surroundings_untouched());
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, EachIsa, testing::Values(Isa::portable, Isa::avx2, Isa::avx512),
                         [](const auto& isa) {
                           return isa.param == Isa::portable ? "portable"
                                  : isa.param == Isa::avx2   ? "avx2"
                                                             : "avx512";
                         });

}  // namespace
}  // namespace accelmgr::collective
