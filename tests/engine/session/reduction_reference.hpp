// What a reduction makes of gradients, by its definition: one element at a time, for tensors of all dtypes.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "elements.hpp"
#include "engine/session/shards.hpp"
#include "session_support.hpp"

namespace accelmgr::session {

using test::Elements;
using test::rounded;
using test::to_unfreeze;

/// Of a gradient, with the gap behind it.
inline std::uint64_t elements_with_gap(const TensorEntry& t) {
  return align_up(t.count, region_alignment / size_of(t.dtype)) * elements_in(t.dtype);
}
inline Elements in_master(std::byte* gradients, const TensorEntry& t) {
  return {gradients + t.gradient, t.types.master, t.has_room() ? elements_with_gap(t) : 0};
}
inline Elements in_slab(Session& s, int rank, const TensorEntry& t) {
  return {s.slab(rank) + t.slab, t.types.slab, t.has_room() ? elements_with_gap(t) : 0};
}

/// The elements of the gradients of all tensors for which there is room.
using Numbers = std::vector<std::vector<double>>;

inline Numbers numbers_in(std::byte* gradients, const Manifest& manifest) {
  Numbers numbers;
  for (const auto& t : manifest.tensors) numbers.push_back(in_master(gradients, t).numbers());
  return numbers;
}

/// One element. `slabs` has what the participants have, in order of rank.
inline double reduced(ElementTypes types, std::span<const double> slabs, double scale, bool accumulate,
                      double before) {
  if (slabs.empty()) return accumulate ? before : 0;
  // Sums and products of float32 are exact in double, or rounded once by the conversion.
  const auto in = [](Element element, double value) {
    return element == Element::f64 ? value : static_cast<float>(value);
  };
  double sum = slabs.front();
  for (const auto slab : slabs.subspan(1)) sum = in(types.slab, sum + slab);
  sum = in(types.master, sum * in(types.master, scale));
  return rounded(types.master, accumulate ? before + sum : sum);
}

/// As a host does it.
inline void unfreeze(Session& s, const Manifest& manifest, std::size_t tensor) {
  const auto& t = manifest.tensors[tensor];
  s.allocate_room(t.gradient, t.gradient_bytes(), t.slab, t.slab_bytes(), all_ranks(s.ranks()));
  s.control().unfrozen_bytes.fetch_add(t.gradient_bytes());
  s.control().unfrozen_slab_bytes.fetch_add(t.slab_bytes());
  s.unfrozen()[tensor].store(1);
}

/// A session with a mixed manifest and one unfrozen tensor.
inline SmallSession mixed_session(int ranks, const std::vector<std::uint64_t>& counts,
                                  const Precision& precision = {}) {
  auto manifest = test::mixed_manifest(counts, precision);
  manifest.buffers = {{.name = "running", .shape = {2}, .dtype = DType::float32, .bytes = 8},
                      {.name = "batches", .shape = {}, .dtype = DType::int64, .bytes = 8}};
  auto session = session_of(manifest, ranks);
  unfreeze(session, manifest, to_unfreeze);
  return {std::move(manifest), std::move(session)};
}

}  // namespace accelmgr::session
