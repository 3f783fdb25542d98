#include "session/layout.hpp"

namespace accelmgr::session {

const char* to_string(Phase phase) noexcept {
  switch (phase) {
    case Phase::none:
      return "none";
    case Phase::init:
      return "init";
    case Phase::waiting:
      return "waiting";
    case Phase::data:
      return "data";
    case Phase::forward:
      return "forward";
    case Phase::backward:
      return "backward";
    case Phase::vote:
      return "vote";
    case Phase::reduce:
      return "reduce";
    case Phase::stopping:
      return "stopping";
  }
  return "?";
}

void plan_layout(const Extent& extent, Header& header) {
  header.layout_version = layout_version;
  header.fingerprint = build_fingerprint();
  header.ranks = static_cast<std::uint32_t>(extent.ranks);
  header.element = extent.element;
  header.slab_element = extent.slab_element;
  header.elements = extent.elements;
  header.tensors = extent.tensors;
  header.buffer_bytes = align_up(extent.buffer_bytes, region_alignment);
  header.slots = extent.slots;
  header.slot_bytes = align_up(extent.slot_bytes, region_alignment);
  const std::uint64_t ranks = header.ranks;
  const std::uint64_t master_bytes = extent.elements * bytes_of(extent.element);

  std::uint64_t at = 0;
  auto region = [&at](std::uint64_t bytes, std::uint64_t alignment) {
    const auto offset = align_up(at, alignment);
    at = offset + bytes;
    return offset;
  };
  region(sizeof(Header), region_alignment);
  header.control = region(sizeof(Control), region_alignment);
  header.records = region(sizeof(RankRecord) * max_ranks, region_alignment);
  header.dealing = region(sizeof(Dealing), region_alignment);
  header.incidents = region(sizeof(Incident) * max_incidents, region_alignment);
  header.manifest_bytes = extent.manifest_bytes;
  header.manifest = region(extent.manifest_bytes, 4096);
  header.copy_bytes = align_up(sizeof(Counters), region_alignment) +
                      ranks * (generator_bytes + header.buffer_bytes) + header.buffer_bytes;
  header.copies = region(2 * header.copy_bytes, region_alignment);
  header.undo = region(ranks * chunk_bytes, 4096);
  // A slot is preceded by its number of elements; the counts of all slots come first.
  header.queue_bytes = sizeof(Queue) + align_up(header.slots * sizeof(std::uint64_t), region_alignment) +
                       header.slots * header.slot_bytes + queue_guard_bytes;
  header.queues = region(ranks * header.queue_bytes, 4096);
  header.parameters = region(master_bytes, big_region_alignment);
  header.gradients = region(master_bytes, big_region_alignment);
  header.total_bytes = align_up(at, 4096);

  const std::uint64_t slab_element_bytes =
      extent.slab_element == SlabElement::bf16 ? 2 : bytes_of(extent.element);
  const bool big = extent.elements * slab_element_bytes >= big_region_alignment;
  header.slab_data_offset =
      align_up(extent.tensors * sizeof(std::uint64_t), big ? big_region_alignment : 4096);
  header.slab_bytes = align_up(header.slab_data_offset + extent.elements * slab_element_bytes, 4096);
}

std::uint64_t session_bytes(const Header& header, int ranks) {
  return header.total_bytes + static_cast<std::uint64_t>(ranks) * header.slab_bytes;
}

std::uint64_t build_fingerprint() noexcept {
  // FNV-1a over what must agree for two programs to share this memory.
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (std::uint64_t value :
       {std::uint64_t{layout_version}, std::uint64_t{sizeof(Header)}, std::uint64_t{sizeof(Control)},
        std::uint64_t{sizeof(RankRecord)}, std::uint64_t{sizeof(Counters)}, std::uint64_t{sizeof(Queue)},
        std::uint64_t{sizeof(Dealing)}, std::uint64_t{sizeof(Incident)}, std::uint64_t{__cplusplus},
        std::uint64_t{__GNUC__}}) {
    hash = (hash ^ value) * 0x100000001b3ull;
  }
  return hash;
}

}  // namespace accelmgr::session
