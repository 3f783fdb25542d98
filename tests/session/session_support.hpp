// Small sessions for the tests of this floor.
#pragma once

#include <span>
#include <vector>

#include "session/manifest.hpp"
#include "session/session.hpp"

namespace accelmgr::session {

struct SmallSession {
  Manifest manifest;
  Session session;
};

/// A session of one tensor for each of `counts`, queues of `slots` slots of `slot_bytes`.
inline SmallSession small_session(int ranks, const std::vector<std::uint64_t>& counts,
                                  std::uint64_t slots = 2, std::uint64_t slot_bytes = 64,
                                  SlabElement slab = SlabElement::same) {
  Manifest manifest;
  for (std::size_t i = 0; i < counts.size(); ++i)
    manifest.tensors.push_back({.name = "w" + std::to_string(i),
                                .aliases = {},
                                .shape = {static_cast<std::int64_t>(counts[i])},
                                .first = 0,
                                .count = counts[i],
                                .group = Group::decay});
  manifest.buffers.push_back({.name = "running", .shape = {2}, .dtype = 6, .offset = 0, .bytes = 8});
  manifest.buffers.push_back({.name = "batches", .shape = {}, .dtype = 4, .offset = 0, .bytes = 8});
  Extent extent{.ranks = ranks, .element = Element::f32, .slab_element = slab};
  extent.elements = manifest.place_tensors(extent.element);
  extent.tensors = counts.size();
  extent.buffer_bytes = manifest.place_buffers();
  extent.manifest_bytes = manifest_bytes(manifest);
  extent.slots = slots;
  extent.slot_bytes = slot_bytes;
  auto session = Session::create(extent, extent.ranks, 1);
  write_manifest(manifest, session.manifest());
  session.publish();
  return {std::move(manifest), std::move(session)};
}

inline std::span<float> gradients_of(const Session& s) {
  return {reinterpret_cast<float*>(s.gradients()), s.header().elements};
}
inline std::span<float> slab_of(const Session& s, int rank) {
  return {reinterpret_cast<float*>(s.slab(rank)), s.header().elements};
}

}  // namespace accelmgr::session
