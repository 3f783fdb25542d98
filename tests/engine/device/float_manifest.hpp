// A manifest of float32 parameters, for tests whose gradients the test computes.
#pragma once

#include <string>
#include <vector>

#include "engine/session/manifest.hpp"

namespace accelmgr::test {

/// A vector of each count. Parameters without a group decay.
inline session::Manifest float_manifest(const std::vector<std::uint64_t>& counts,
                                        std::vector<session::Group> groups = {}) {
  groups.resize(counts.size(), session::Group::decay);
  session::Manifest manifest;
  for (std::size_t i = 0; i < counts.size(); ++i)
    manifest.tensors.push_back({.name = "p" + std::to_string(i),
                                .aliases = {},
                                .shape = {static_cast<std::int64_t>(counts[i])},
                                .count = counts[i],
                                .group = groups[i]});
  manifest.place_tensors();
  return manifest;
}

}  // namespace accelmgr::test
