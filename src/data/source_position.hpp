// Where a built-in source stands, as text: `text seed=1 documents=3 bytes=1220 sequence_length=16 epoch=3
// position=17`. What comes before the epoch must be that of the source restored: its elements depend on it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace accelmgr::data {

struct SourcePosition {
  std::uint64_t epoch = 0;
  std::uint64_t position = 0;  ///< Elements of the epoch that were given.
  bool operator==(const SourcePosition&) const = default;
};

/// What tells a source from others, by name.
using Identity = std::vector<std::pair<std::string, std::uint64_t>>;

std::string write_position(const std::string& kind, const Identity& identity, SourcePosition at);

/// The inverse. Throws DataError, which says what is wrong: another kind or identity, or what is no position
/// at all; an epoch beyond `epochs` (0: endless).
SourcePosition read_position(const std::string& state, const std::string& kind, const Identity& identity,
                             std::uint64_t epochs);

/// Throws DataError when the epoch has fewer elements than were given.
void check_position(SourcePosition at, std::uint64_t epoch_elements);

}  // namespace accelmgr::data
