#include "engine/session/strided.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace accelmgr::session {
namespace {

/// Strides for a shape: the dimensions have any order in memory, with gaps between them.
struct Layout {
  std::vector<std::int64_t> strides;
  std::int64_t extent = 1;
};

Layout random_layout(const std::vector<std::int64_t>& shape) {
  std::vector<std::size_t> order(shape.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[*rc::gen::inRange<std::size_t>(0, i)]);
  Layout layout{std::vector<std::int64_t>(shape.size()), 1};
  for (const auto d : order) {
    layout.strides[d] = layout.extent;
    layout.extent *= std::max<std::int64_t>(shape[d], 1) + *rc::gen::inRange<std::int64_t>(0, 2);
  }
  return layout;
}

/// Calls visit(offset in one, offset in the other) for each element.
template <class Visit>
void each(const std::vector<std::int64_t>& shape, const Layout& one, const Layout& other, const Visit& visit,
          std::size_t d = 0, std::int64_t a = 0, std::int64_t b = 0) {
  if (d == shape.size()) return visit(static_cast<std::size_t>(a), static_cast<std::size_t>(b));
  for (std::int64_t i = 0; i < shape[d]; ++i)
    each(shape, one, other, visit, d + 1, a + i * one.strides[d], b + i * other.strides[d]);
}

TEST(Strided, EveryElementArrivesAndNothingElseIsWritten) {
  EXPECT_TRUE(rc::check("copies between any strides", [] {
    const auto dimensions = *rc::gen::inRange<std::size_t>(0, 5);
    std::vector<std::int64_t> shape(dimensions);
    for (auto& size : shape) size = *rc::gen::inRange<std::int64_t>(0, dimensions < 3 ? 40 : 5);
    const auto to = random_layout(shape), from = random_layout(shape);
    std::vector<std::int32_t> source(static_cast<std::size_t>(from.extent));
    std::iota(source.begin(), source.end(), 1);
    std::vector<std::int32_t> expected(static_cast<std::size_t>(to.extent), -1), got = expected;
    each(shape, to, from, [&](std::size_t a, std::size_t b) { expected[a] = source[b]; });
    copy_strided(reinterpret_cast<std::byte*>(got.data()), to.strides,
                 reinterpret_cast<const std::byte*>(source.data()), from.strides, shape,
                 sizeof(std::int32_t));
    RC_ASSERT(got == expected);
  }));
}

TEST(Strided, ATensorIsCompactInAnyOrderOfItsDimensions) {
  using Numbers = std::vector<std::int64_t>;
  EXPECT_TRUE(is_compact(Numbers{}, Numbers{}));
  EXPECT_TRUE(is_compact(Numbers{2, 3}, Numbers{3, 1}));
  EXPECT_TRUE(is_compact(Numbers{2, 3}, Numbers{1, 2}));
  EXPECT_TRUE(is_compact(Numbers{2, 4, 3, 3}, Numbers{36, 1, 12, 4})) << "channels_last";
  EXPECT_TRUE(is_compact(Numbers{2, 1, 3}, Numbers{3, 77, 1}))
      << "the stride of a dimension of 1 says nothing";
  EXPECT_FALSE(is_compact(Numbers{2, 3}, Numbers{4, 1})) << "gaps";
  EXPECT_FALSE(is_compact(Numbers{2, 3}, Numbers{0, 1})) << "overlaps";
  EXPECT_FALSE(is_compact(Numbers{2, 2}, Numbers{1, 1}));
  EXPECT_FALSE(is_compact(Numbers{0, 2}, Numbers{2, 1}));
}

}  // namespace
}  // namespace accelmgr::session
