#include "session/shards.hpp"

#include <algorithm>
#include <limits>

namespace accelmgr::session {

ShardPlan::ShardPlan(const Manifest& manifest, Element element, Of of)
    : alignment_(region_alignment / bytes_of(element)) {
  for (const auto group : {Group::decay, Group::no_decay, Group::frozen}) {
    if (group == Group::frozen && of == Of::gradients) continue;
    std::uint64_t room = 0;  // A group has buckets of its own: its tensors lie together.
    for (std::size_t i = manifest.tensors.size(); i-- > 0;) {
      const auto& tensor = manifest.tensors[i];
      if (tensor.group != group) continue;
      const auto end = align_up(tensor.first + tensor.count, alignment_);
      if (room == 0) {
        room = (buckets_.empty() ? first_bucket_bytes : bucket_bytes) / bytes_of(element);
        buckets_.push_back({.first = end, .end = end});
        tensors_.emplace_back();
      }
      buckets_.back().first = tensor.first;
      tensors_.back().insert(tensors_.back().begin(), i);
      room -= std::min(room, tensor.count);
    }
  }
  sorted_ = buckets_;
  std::ranges::sort(sorted_, {}, &Elements::first);
}

std::uint64_t ShardPlan::shard_elements(const Elements& bucket, int size) const noexcept {
  const auto ranks = static_cast<std::uint64_t>(size);
  return align_up((bucket.count() + ranks - 1) / ranks, alignment_);
}

Elements ShardPlan::shard(const Elements& bucket, int position, int size) const noexcept {
  const auto each = shard_elements(bucket, size);
  const auto first = std::min(bucket.first + each * static_cast<std::uint64_t>(position), bucket.end);
  return {first, std::min(first + each, bucket.end)};
}

ShardPlan::Holder ShardPlan::holder_of(std::uint64_t element, int size) const noexcept {
  const auto bucket = std::ranges::upper_bound(sorted_, element, {}, &Elements::end);
  if (bucket == sorted_.end()) return {-1, std::numeric_limits<std::uint64_t>::max()};
  if (element < bucket->first) return {-1, bucket->first};
  const auto position = static_cast<int>((element - bucket->first) / shard_elements(*bucket, size));
  return {position, shard(*bucket, position, size).end};
}

}  // namespace accelmgr::session
