// Uses all of a session, for the tests that damage one.
#pragma once

#include <stdexcept>

#include "engine/session/batch_queue.hpp"
#include "session_support.hpp"

namespace accelmgr::session {

inline void must(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

inline Manifest some_manifest() {
  Manifest manifest;
  manifest.tensors = {
      {.name = "weight", .aliases = {"tied"}, .shape = {2, 300}, .count = 600},
      {.name = "bias", .aliases = {}, .shape = {3}, .count = 3, .group = Group::no_decay},
      {.name = "none", .aliases = {}, .shape = {0, 4}, .count = 0, .group = Group::frozen},
      tensor_of(5, DType::bfloat16, Group::decay, "half"),
      tensor_of(3, DType::complex64, Group::decay, "wave"),
      tensor_of(7, DType::float16, Group::frozen, "frozen"),
      tensor_of(70, DType::int8, Group::frozen, "codes"),
      {.name = "column",
       .aliases = {},
       .shape = {2, 5},
       .count = 10,
       .shares = 0,
       .shared_offset = 7,
       .strides = {300, 2}},
  };
  manifest.set_precision({.bf16_slabs = true});
  manifest.buffers = {{.name = "mean", .shape = {2}, .bytes = 8},
                      {.name = "count",
                       .aliases = {"n"},
                       .shape = {},
                       .dtype = DType::int64,
                       .bytes = 8,
                       .persistent = false}};
  manifest.fields = {{.name = "input", .shape = {3, 4}, .dtype = DType::float64, .element_bytes = 96},
                     {.name = "target", .shape = {}, .dtype = DType::uint8, .element_bytes = 1}};
  return manifest;
}

/// Reads and writes the first and the last byte of a range.
inline void touch(std::byte* p, std::uint64_t bytes) {
  if (bytes == 0) return;
  for (volatile auto* byte : {p, p + bytes - 1}) *byte = *byte;
}

/// Uses the session as host, manager and runners do, with only the header and the manifest to go by.
inline void use(Session& s) {
  const auto manifest = read_manifest(s);
  const auto& h = s.header();
  touch(s.parameters(), h.bytes.parameters);
  touch(s.gradients(), h.bytes.gradient_room);
  must(s.unfrozen().size() == manifest.tensors.size(), "a flag for each tensor");
  for (auto& flag : s.unfrozen()) flag.fetch_add(0);
  for (const auto& t : manifest.tensors) {
    touch(s.parameters() + t.offset, t.bytes());
    if (t.has_room()) touch(s.gradients() + t.gradient, t.gradient_bytes());
    for (int rank = 0; rank < s.ranks() && t.has_room(); ++rank) touch(s.slab(rank) + t.slab, t.slab_bytes());
    if (t.shares < 0 || t.count == 0) continue;
    const auto& owner = manifest.tensors.at(static_cast<std::size_t>(t.shares));
    auto last = t.shared_offset;
    for (std::size_t d = 0; d < t.shape.size(); ++d)
      last += static_cast<std::uint64_t>((t.shape[d] - 1) * t.strides.at(d));
    must(last < owner.count, "a shared tensor within its owner");
    touch(s.parameters() + owner.offset + last * size_of(owner.dtype), size_of(owner.dtype));
  }
  for (int rank = 0; rank < s.ranks(); ++rank) {
    must(s.tags(rank).size() == manifest.tensors.size(), "a tag for each tensor");
    for (auto& tag : s.tags(rank)) tag.store(tag.load(), tag.first(), tag.end());
    touch(reinterpret_cast<std::byte*>(&s.record(rank)), sizeof(RankRecord));
    touch(s.undo(rank), max_parts * chunk_bytes);
    touch(reinterpret_cast<std::byte*>(&s.queue(rank)), h.queue_bytes);
    for (const std::uint32_t index : {0u, 1u}) {
      touch(s.generator(index, rank), generator_bytes);
      for (auto* copy : {s.buffers(index, rank), s.result_buffers(index)}) {
        touch(copy, h.buffer_bytes);
        for (const auto& b : manifest.buffers) {
          must(b.offset + b.bytes <= h.buffer_bytes, "a buffer within its copy");
          touch(copy + b.offset, b.bytes);
        }
      }
    }
    BatchQueueWriter queue(s, rank);
    for (std::uint64_t number = 0; number < h.slots && number < 3; ++number)
      for (const auto& f : manifest.fields) {
        must(f.offset + f.element_bytes * h.batch_size <= h.slot_bytes, "a field within its slot");
        touch(const_cast<std::byte*>(queue.slot(number)) + f.offset, f.element_bytes * h.batch_size);
      }
  }
  for (std::uint64_t ring = 0; ring < span_rings(s.ranks()); ++ring)
    touch(reinterpret_cast<std::byte*>(&s.span_ring(ring)), sizeof(SpanRing));
  touch(reinterpret_cast<std::byte*>(&s.sharding()), sizeof(Sharding));
  touch(reinterpret_cast<std::byte*>(&s.incident(max_incidents)), sizeof(Incident));
  (void)s.source_state();
}

}  // namespace accelmgr::session
