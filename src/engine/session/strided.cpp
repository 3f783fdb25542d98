#include "engine/session/strided.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace accelmgr::session {
namespace {

constexpr std::int64_t block_columns = 16;  ///< A cache line of float32.

template <std::size_t element_bytes>
struct Copy {
  std::span<const std::int64_t> to_strides, from_strides, shape;

  /// Whether the dimensions from `d` on are row-major without gaps in both tensors. `count` is then their
  /// number of elements.
  bool dense_from(std::size_t d, std::int64_t& count) const {
    count = 1;
    for (std::size_t i = shape.size(); i-- > d;) {
      if (shape[i] != 1 && (to_strides[i] != count || from_strides[i] != count)) return false;
      count *= shape[i];
    }
    return true;
  }

  void run(std::byte* to, const std::byte* from, std::size_t d) const {
    std::int64_t count = 0;
    if (dense_from(d, count)) {
      std::memcpy(to, from, static_cast<std::size_t>(count) * element_bytes);
      return;
    }
    if (d + 2 >= shape.size() && !dense_from(shape.size() - 1, count)) return plane(to, from, d);
    for (std::int64_t i = 0; i < shape[d]; ++i)
      run(to + i * to_strides[d] * bytes, from + i * from_strides[d] * bytes, d + 1);
  }

 private:
  static constexpr auto bytes = static_cast<std::int64_t>(element_bytes);

  /// The last two dimensions, or the only one. In blocks of columns: if one of the tensors is transposed, a
  /// block's cache lines are used as a whole before the next ones are needed.
  void plane(std::byte* to, const std::byte* from, std::size_t d) const {
    const auto column = shape.size() - 1;
    const bool has_rows = d < column;
    const auto rows = has_rows ? shape[d] : 1;
    const auto to_row = has_rows ? to_strides[d] * bytes : 0,
               from_row = has_rows ? from_strides[d] * bytes : 0;
    const auto to_column = to_strides[column] * bytes, from_column = from_strides[column] * bytes;
    for (std::int64_t begin = 0; begin < shape[column]; begin += block_columns) {
      const auto end = std::min(begin + block_columns, shape[column]);
      for (std::int64_t i = 0; i < rows; ++i)
        for (auto j = begin; j < end; ++j)
          std::memcpy(to + i * to_row + j * to_column, from + i * from_row + j * from_column, element_bytes);
    }
  }
};

}  // namespace

std::vector<std::int64_t> dense_strides(std::span<const std::int64_t> shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t next = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    strides[d] = next;
    next *= std::max<std::int64_t>(shape[d], 1);
  }
  return strides;
}

bool is_compact(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dimensions;  // Stride, size.
  for (std::size_t d = 0; d < shape.size(); ++d)
    if (shape[d] != 1) dimensions.emplace_back(strides[d], shape[d]);
  std::ranges::sort(dimensions);
  std::int64_t next = 1;
  for (const auto& [stride, size] : dimensions)
    if (stride != next || __builtin_mul_overflow(next, size, &next)) return false;
  return next > 0;
}

std::vector<std::int64_t> stored_shape(std::span<const std::int64_t> shape,
                                       std::span<const std::int64_t> strides) {
  std::vector<std::int64_t> stored(shape.begin(), shape.end());
  for (std::size_t d = 0; d < stored.size(); ++d)
    if (strides[d] == 0 && stored[d] > 0) stored[d] = 1;
  return stored;
}

void copy_strided(std::byte* to, std::span<const std::int64_t> to_strides, const std::byte* from,
                  std::span<const std::int64_t> from_strides, std::span<const std::int64_t> shape,
                  std::size_t element_bytes) {
  if (std::ranges::find(shape, 0) != shape.end()) return;
  switch (element_bytes) {
    case 1:
      return Copy<1>{to_strides, from_strides, shape}.run(to, from, 0);
    case 2:
      return Copy<2>{to_strides, from_strides, shape}.run(to, from, 0);
    case 4:
      return Copy<4>{to_strides, from_strides, shape}.run(to, from, 0);
    case 8:
      return Copy<8>{to_strides, from_strides, shape}.run(to, from, 0);
    default:
      return Copy<16>{to_strides, from_strides, shape}.run(to, from, 0);
  }
}

}  // namespace accelmgr::session
