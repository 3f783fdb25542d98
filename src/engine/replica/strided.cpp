#include "engine/replica/strided.hpp"

#include <cstring>

namespace accelmgr::replica {
namespace {

struct Copy {
  std::span<const std::int64_t> to_strides, from_strides, shape;
  std::size_t element_bytes;

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
    const auto bytes = static_cast<std::int64_t>(element_bytes);
    for (std::int64_t i = 0; i < shape[d]; ++i)
      run(to + i * to_strides[d] * bytes, from + i * from_strides[d] * bytes, d + 1);
  }
};

}  // namespace

void copy_strided(std::byte* to, std::span<const std::int64_t> to_strides, const std::byte* from,
                  std::span<const std::int64_t> from_strides, std::span<const std::int64_t> shape,
                  std::size_t element_bytes) {
  for (const auto size : shape)
    if (size == 0) return;
  Copy{to_strides, from_strides, shape, element_bytes}.run(to, from, 0);
}

}  // namespace accelmgr::replica
