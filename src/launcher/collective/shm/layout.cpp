#include "launcher/collective/shm/layout.hpp"

#include "base/fnv1a.hpp"

namespace accelmgr::collective::shm {

void plan_layout(std::uint32_t ranks, bool parks, Header& header) noexcept {
  header.layout_version = layout_version;
  header.ranks = ranks;
  header.fingerprint = build_fingerprint();
  const std::uint64_t n = ranks;
  header.rank_lines = 256;
  header.slots = header.rank_lines + n * sizeof(Rank);
  header.controls = ipc::whole_pages(header.slots + slots * sizeof(Slot));
  header.control_bytes = ipc::whole_pages(sizeof(Control) + n * sizeof(Member));
  header.data = header.controls + slots * header.control_bytes;
  header.parks = parks ? 1 : 0;
  header.half_bytes = parks && ranks <= parking_half_ranks ? parking_half_bytes : spinning_half_bytes;
  header.data_bytes = n * 2 * header.half_bytes;
  header.total_bytes = header.data + slots * header.data_bytes;
}

std::uint64_t build_fingerprint() noexcept {
  // What must be equal in two programs that share this memory.
  return base::fnv1a({std::uint64_t{layout_version}, std::uint64_t{sizeof(Header)},
                      std::uint64_t{sizeof(Rank)}, std::uint64_t{sizeof(Slot)},
                      std::uint64_t{sizeof(Control)}, std::uint64_t{sizeof(Member)}, std::uint64_t{slots},
                      std::uint64_t{spinning_half_bytes}, std::uint64_t{parking_half_bytes}});
}

}  // namespace accelmgr::collective::shm
