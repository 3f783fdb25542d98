// The memory order of tensors, and copies between tensors of any strides. Strides are in elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace accelmgr::session {

/// The strides of a row-major tensor without gaps.
std::vector<std::int64_t> dense_strides(std::span<const std::int64_t> shape);

/// Whether the tensor fills its memory without gaps and overlaps, in any order of its dimensions: transposed
/// and channels_last tensors do. False for a tensor without elements.
bool is_compact(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides);

/// The shape of the elements in memory: 1 for each dimension with a stride of 0, as torch's expand() makes
/// it.
std::vector<std::int64_t> stored_shape(std::span<const std::int64_t> shape,
                                       std::span<const std::int64_t> strides);

/// Copies a tensor of shape `shape` whose elements have `element_bytes` bytes: 1, 2, 4, 8 or 16. `to` and
/// `from` must not overlap. If several elements go to one place of `to`, the last one stays there.
void copy_strided(std::byte* to, std::span<const std::int64_t> to_strides, const std::byte* from,
                  std::span<const std::int64_t> from_strides, std::span<const std::int64_t> shape,
                  std::size_t element_bytes);

}  // namespace accelmgr::session
