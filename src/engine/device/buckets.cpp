#include "engine/device/buckets.hpp"

#include <algorithm>

namespace accelmgr::device {

std::vector<std::vector<std::size_t>> plan_buckets(std::span<const std::size_t> order,
                                                   std::span<const std::uint64_t> bytes) {
  std::vector<std::vector<std::size_t>> buckets;
  std::uint64_t room = 0;
  for (const auto parameter : order) {
    if (room == 0) {
      room = buckets.empty() ? first_bucket_bytes : bucket_bytes;
      buckets.emplace_back();
    }
    buckets.back().push_back(parameter);
    room -= std::min(room, bytes[parameter]);
  }
  return buckets;
}

}  // namespace accelmgr::device
