// The position of a built-in source, as text: `text seed=1 documents=3 bytes=1220 sequence_length=16 epoch=3
// position=17`. Everything before the epoch must match the source that is restored, because its elements
// depend on it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace accelmgr::data {

struct SourcePosition {
  std::uint64_t epoch = 0;
  std::uint64_t position = 0;  ///< How many elements of the epoch were given.
  bool operator==(const SourcePosition&) const = default;
};

/// The values that distinguish a source from others, with their names.
using Identity = std::vector<std::pair<std::string, std::uint64_t>>;

std::string write_position(const std::string& kind, const Identity& identity, SourcePosition at);

/// The inverse of write_position(). Throws DataError, which says what is wrong, for another kind or identity,
/// for any other text, and for an epoch beyond `epochs` (0: endless).
SourcePosition read_position(const std::string& state, const std::string& kind, const Identity& identity,
                             std::uint64_t epochs);

/// Throws DataError when the epoch has fewer elements than `at.position`.
void check_position(SourcePosition at, std::uint64_t epoch_elements);

}  // namespace accelmgr::data
