// Copies between tensors of any strides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace accelmgr::replica {

/// Copies a tensor of shape `shape` whose elements have `element_bytes` bytes. Strides are in elements. `to`
/// and `from` must not overlap.
void copy_strided(std::byte* to, std::span<const std::int64_t> to_strides, const std::byte* from,
                  std::span<const std::int64_t> from_strides, std::span<const std::int64_t> shape,
                  std::size_t element_bytes);

}  // namespace accelmgr::replica
