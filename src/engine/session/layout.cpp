#include "engine/session/layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <string>

#include "accelmgr/errors.hpp"
#include "base/enum_names.hpp"
#include "base/fnv1a.hpp"
#include "base/ipc/pages.hpp"

namespace accelmgr::session {

const char* to_string(Phase phase) noexcept {
  static constexpr const char* names[]{"none",     "init", "waiting", "data",   "forward",
                                       "backward", "vote", "reduce",  "update", "stopping"};
  return base::enum_name<Phase::stopping>(names, phase);
}

const char* to_string(Activity activity) noexcept {
  static constexpr const char* names[]{"none",
                                       "step",
                                       "assemble",
                                       "attempt",
                                       "zero_grad",
                                       "write_parameters",
                                       "copy_checkpoint",
                                       "init",
                                       "waiting",
                                       "prepare",
                                       "data",
                                       "forward",
                                       "backward",
                                       "vote",
                                       "other_votes",
                                       "reduce",
                                       "update",
                                       "recover",
                                       "start_runner",
                                       "read",
                                       "write_checkpoint"};
  return base::enum_name<Activity::write_checkpoint>(names, activity);
}

double RateSchedule::rate(double highest, std::int64_t update) const noexcept {
  if (update < warmup_updates)
    return highest * static_cast<double>(update + 1) / static_cast<double>(warmup_updates);
  if (total_updates == 0) return highest;
  const std::int64_t decay_updates = total_updates - 1 - warmup_updates;
  const double progress =
      decay_updates > 0
          ? std::min(1.0, static_cast<double>(update - warmup_updates) / static_cast<double>(decay_updates))
          : 1.0;
  const double falling = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return highest * (final_ratio + (1.0 - final_ratio) * falling);
}

void plan_layout(const Extent& extent, Header& header) {
  header.layout_version = layout_version;
  header.fingerprint = build_fingerprint();
  header.ranks = static_cast<std::uint32_t>(extent.ranks);
  header.bytes = extent.bytes;
  header.tensors = extent.tensors;
  header.has_snapshot = extent.has_snapshot ? 1 : 0;
  header.buffer_bytes = align_up(extent.buffer_bytes, region_alignment);
  header.slots = extent.slots;
  header.keeps_last_step = extent.keeps_last_step ? 1 : 0;
  header.slot_bytes = align_up(extent.slot_bytes, region_alignment);
  header.batch_size = extent.batch_size;
  const std::uint64_t ranks = header.ranks;

  std::uint64_t at = 0;
  auto region = [&at](std::uint64_t bytes, std::uint64_t alignment) {
    const auto offset = align_up(at, alignment);
    at = offset + bytes;
    return offset;
  };
  region(sizeof(Header), region_alignment);
  header.control = region(sizeof(Control), region_alignment);
  header.records = region(sizeof(RankRecord) * max_ranks, region_alignment);
  header.sharding = region(sizeof(Sharding), region_alignment);
  header.incidents = region(sizeof(Incident) * max_incidents, region_alignment);
  header.history = region(sizeof(StepHistory), region_alignment);
  header.manifest_bytes = extent.manifest_bytes;
  header.manifest = region(extent.manifest_bytes, ipc::largest_page_bytes);
  header.unfrozen = region(extent.tensors * sizeof(std::uint32_t), region_alignment);
  header.updated = region(extent.tensors * sizeof(UpdatedTensor), region_alignment);
  header.copy_bytes = align_up(sizeof(Counters), region_alignment) +
                      align_up(extent.tensors * sizeof(Count), region_alignment) +
                      ranks * (generator_bytes + header.buffer_bytes) + header.buffer_bytes;
  header.copies = region(2 * header.copy_bytes, region_alignment);
  header.undo = region(ranks * max_parts * image_bytes, ipc::largest_page_bytes);
  // In a queue the numbers of elements of all slots come first, then the slots.
  header.queue_bytes = sizeof(Queue) + align_up(header.slots * sizeof(std::uint64_t), region_alignment) +
                       header.slots * header.slot_bytes + queue_guard_bytes;
  header.queues = region(ranks * header.queue_bytes, ipc::largest_page_bytes);
  header.spans = region(span_rings(extent.ranks) * sizeof(SpanRing), region_alignment);
  header.parameters = region(extent.bytes.parameters, big_region_alignment);
  header.snapshot = extent.has_snapshot ? region(extent.bytes.parameters, big_region_alignment) : 0;
  header.gradients = region(extent.bytes.gradient_room, big_region_alignment);
  header.moments = region(2 * extent.bytes.trained, big_region_alignment);
  header.total_bytes = ipc::whole_pages(at);

  const bool big = extent.bytes.slab >= big_region_alignment;
  header.slab_data_offset =
      align_up(extent.tensors * sizeof(Tag), big ? big_region_alignment : ipc::largest_page_bytes);
  header.slab_bytes = ipc::whole_pages(header.slab_data_offset + extent.bytes.slab_room);
}

void plan_stated_layout(const Header& header, std::uint64_t bytes, Header& plan) {
  // Each size is read once: a process that writes there meanwhile cannot change what was checked.
  Extent extent{.ranks = static_cast<int>(header.ranks),
                .bytes = header.bytes,
                .tensors = header.tensors,
                .has_snapshot = header.has_snapshot != 0,
                .buffer_bytes = header.buffer_bytes,
                .manifest_bytes = header.manifest_bytes,
                .slots = header.slots,
                .keeps_last_step = header.keeps_last_step != 0,
                .slot_bytes = header.slot_bytes,
                .batch_size = header.batch_size};
  const auto check = [](bool ok, const char* field, std::uint64_t value, const std::string& right) {
    if (!ok)
      throw SessionError(
          fmt::format("the header of the session: {} is {}; it must be {}", field, value, right));
  };
  const auto ranks = static_cast<std::uint64_t>(extent.ranks);
  check(extent.ranks >= 1 && extent.ranks <= max_ranks, "ranks", ranks, fmt::format("1 to {}", max_ranks));
  check(extent.slots == 0 || extent.batch_size > 0, "batch_size", extent.batch_size, "1 or more");
  // With these bounds no sum or product of the plan overflows, because a mapped memfd has less than 2^56
  // bytes.
  const auto fits = [&](const char* field, std::uint64_t value) {
    check(value <= bytes, field, value, fmt::format("at most the {} bytes of the session", bytes));
  };
  fits("bytes.parameters", extent.bytes.parameters);
  fits("bytes.gradient_room", extent.bytes.gradient_room);
  check(extent.bytes.trained <= extent.bytes.parameters, "bytes.trained", extent.bytes.trained,
        fmt::format("at most bytes.parameters, {}", extent.bytes.parameters));
  check(extent.bytes.gradients <= extent.bytes.gradient_room, "bytes.gradients", extent.bytes.gradients,
        fmt::format("at most bytes.gradient_room, {}", extent.bytes.gradient_room));
  // A slab has at most the element size of the gradients.
  check(extent.bytes.slab_room <= extent.bytes.gradient_room, "bytes.slab_room", extent.bytes.slab_room,
        fmt::format("at most bytes.gradient_room, {}", extent.bytes.gradient_room));
  check(extent.bytes.slab <= extent.bytes.slab_room, "bytes.slab", extent.bytes.slab,
        fmt::format("at most bytes.slab_room, {}", extent.bytes.slab_room));
  fits("buffer_bytes", extent.buffer_bytes);
  fits("manifest_bytes", extent.manifest_bytes);
  fits("slot_bytes", extent.slot_bytes);
  check(extent.slots <= bytes / (extent.slot_bytes + sizeof(std::uint64_t)), "slots", extent.slots,
        fmt::format("small enough to fit into the {} bytes of the session", bytes));
  // Each tensor has an entry in the manifest.
  check(extent.tensors <= extent.manifest_bytes, "tensors", extent.tensors,
        fmt::format("at most the {} bytes of the manifest", extent.manifest_bytes));
  plan_layout(extent, plan);
  constexpr auto skipped = sizeof plan.magic;
  const auto* stated = reinterpret_cast<const std::byte*>(&header);
  const auto* planned = reinterpret_cast<const std::byte*>(&plan);
  if (std::memcmp(stated + skipped, planned + skipped, sizeof plan - skipped) != 0)
    throw SessionError(
        fmt::format("the header of the session contradicts itself: its offsets are not those of a session of "
                    "{} ranks, {} bytes of parameters, {} tensors and {} slots of {} bytes",
                    ranks, extent.bytes.parameters, extent.tensors, extent.slots, extent.slot_bytes));
  if (plan.total_bytes != bytes)
    throw SessionError(fmt::format("the session has {} bytes; its header says {}", bytes, plan.total_bytes));
}

std::uint64_t session_bytes(const Header& header, int ranks) {
  return header.gradients + header.bytes.gradients +
         static_cast<std::uint64_t>(ranks) * (header.slab_data_offset + header.bytes.slab);
}

std::uint64_t build_fingerprint() noexcept {
  // What must be equal in two programs that share this memory. They may be of different compilers, a wheel's
  // clang and this machine's g++, for all of Linux lay out a struct alike.
  return base::fnv1a({std::uint64_t{layout_version}, std::uint64_t{sizeof(Header)},
                      std::uint64_t{sizeof(Control)}, std::uint64_t{sizeof(RankRecord)},
                      std::uint64_t{sizeof(Counters)}, std::uint64_t{sizeof(Queue)},
                      std::uint64_t{sizeof(Sharding)}, std::uint64_t{sizeof(Incident)},
                      std::uint64_t{sizeof(StepHistory)}, std::uint64_t{sizeof(SpanRing)}});
}

}  // namespace accelmgr::session
