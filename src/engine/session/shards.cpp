#include "engine/session/shards.hpp"

#include <algorithm>
#include <map>

namespace accelmgr::session {

ShardPlan::ShardPlan(const Manifest& manifest, Of of) {
  auto placed = manifest;
  for (auto& tensor : placed.tensors) tensor.dtype = tensor.runner_dtype;
  bytes_ = placed.place_tensors().parameters;
  for (const auto& tensor : placed.tensors) places_.push_back(tensor.offset);

  BucketRule rule;
  for (const auto group : {Group::decay, Group::no_decay, Group::frozen}) {
    std::map<DType, std::vector<std::size_t>> of_dtype;  // Tensors of a dtype lie together.
    for (std::size_t i = 0; i < placed.tensors.size(); ++i)
      if (const auto& tensor = placed.tensors[i];
          tensor.group == group && (of == Of::parameters || tensor.has_room()))
        of_dtype[tensor.dtype].push_back(i);
    for (const auto& [dtype, tensors] : of_dtype)
      cut(placed, tensors, rule, /*each_alone=*/group == Group::frozen && of == Of::gradients);
  }
}

bool ShardPlan::is_of_slabs(const Manifest& manifest) const noexcept {
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (const auto& entry = manifest.tensors[i];
        entry.has_room() && (entry.types.slab != entry.types.gradient || entry.slab != places_[i]))
      return false;
  return true;
}

/// Makes buckets of tensors that lie together.
void ShardPlan::cut(const Manifest& manifest, std::span<const std::size_t> tensors, BucketRule& rule,
                    bool each_alone) {
  rule.end();
  for (auto at = tensors.size(); at-- > 0;) {
    const auto i = tensors[at];
    const auto& tensor = manifest.tensors[i];
    const auto end = align_up(tensor.offset + tensor.bytes(), region_alignment);
    if (each_alone) rule.end();
    if (rule.begins(tensor.bytes())) {
      buckets_.push_back({.first = end, .end = end});
      tensors_.emplace_back();
    }
    buckets_.back().first = tensor.offset;
    tensors_.back().insert(tensors_.back().begin(), i);
  }
}

std::uint64_t ShardPlan::shard_bytes(const Bytes& bucket, int size) const noexcept {
  const auto ranks = static_cast<std::uint64_t>(size);
  return align_up((bucket.count() + ranks - 1) / ranks, region_alignment);
}

Bytes ShardPlan::shard(const Bytes& bucket, int position, int size) const noexcept {
  const auto each = shard_bytes(bucket, size);
  const auto first = std::min(bucket.first + each * static_cast<std::uint64_t>(position), bucket.end);
  return {first, std::min(first + each, bucket.end)};
}

}  // namespace accelmgr::session
