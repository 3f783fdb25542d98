#include "engine/device/gradient_shards.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "accelmgr/errors.hpp"

namespace accelmgr::device {

GradientShards::GradientShards(const Parts& parts, DeviceCollectives& collectives)
    : parts_(parts),
      collectives_(collectives),
      plan_(parts.binding.manifest),
      computed_(parts.device.make_event()),
      parameters_(parts.binding.manifest.tensors.size()) {
  std::uint64_t most = 1;
  for (const auto& bytes : plan_.buckets()) {
    const auto tensors = plan_.tensors(buckets_.size());
    for (const auto i : tensors) parameters_[i].bucket = buckets_.size();
    buckets_.push_back({.bytes = bytes,
                        .shard = plan_.shard(bytes, collectives.rank(), collectives.size()),
                        .element = parts.binding.manifest.tensors[tensors.front()].types.gradient,
                        .ready = parts.device.make_event(),
                        .arrived = parts.device.make_event()});
    if (parts.binding.manifest.tensors[tensors.front()].group != session::Group::frozen)
      most = std::max(most, plan_.shard_bytes(bytes, collectives.size()));
  }
  make_room(most);
}

/// Allocates memory for shards of `bytes`.
void GradientShards::make_room(std::uint64_t bytes) {
  if (bytes <= room_) return;
  sum_ = parts_.device.allocate(bytes);
  gathered_ = parts_.device.allocate(bytes * static_cast<std::uint64_t>(collectives_.size()));
  room_ = bytes;
}

GradientShards::~GradientShards() {
  abandon();
  parts_.device.settle(parts_.copies);  // An attempt that was left may still use the memory.
}

void GradientShards::abandon() noexcept {
  if (std::exchange(under_way_, false)) collectives_.abort();
}

void GradientShards::begin_attempt() {
  for (auto& parameter : parameters_) parameter.gradient = nullptr, parameter.complete = false;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    const auto tensors = plan_.tensors(i);
    buckets_[i].incomplete = tensors.size();
    buckets_[i].is_trained = parts_.binding.gradients.is_trained(tensors.front());
    if (buckets_[i].is_trained) make_room(plan_.shard_bytes(buckets_[i].bytes, collectives_.size()));
  }
  queued_ = skip_frozen(0);
}

/// The first bucket from this one on that has a part in the attempt.
std::size_t GradientShards::skip_frozen(std::size_t bucket) const {
  while (bucket < buckets_.size() && !buckets_[bucket].is_trained) ++bucket;
  return bucket;
}

/// Whether the attempt ended for this rank because nobody wants it.
bool GradientShards::left() { return collectives_.aborted() && !parts_.binding.progress.wanted(); }

void GradientShards::written(std::size_t index, const std::byte* gradient, const Event* complete) {
  if (index >= parameters_.size())
    throw ModelError(fmt::format("a gradient was passed for parameter {}, but the model has {} parameters",
                                 index, parameters_.size()));
  auto& parameter = parameters_[index];
  const auto& name = parts_.binding.manifest.tensors[index].name;
  if (parameter.bucket == nowhere || !buckets_[parameter.bucket].is_trained)
    throw ModelError(fmt::format("a gradient of '{}' was passed, but the parameter is frozen", name));
  if (parameter.bucket < queued_)
    throw ModelError(fmt::format("the gradient of '{}' was written after its copy had been queued", name));
  parameter.gradient = gradient;
  if (!parts_.binding.progress.last_micro_batch() || parameter.complete) return;
  parameter.complete = true;
  --buckets_[parameter.bucket].incomplete;
  if (!left()) queue_complete(complete);
}

void GradientShards::queue_complete(const Event* complete) {
  while (queued_ < buckets_.size() && buckets_[queued_].incomplete == 0)
    if (!queue_next(complete)) return;
}

/// Returns false if the runner no longer wants the attempt.
bool GradientShards::queue_next(const Event* complete) {
  const auto& bucket = buckets_[queued_];
  auto& device = parts_.device;
  auto* stream = parts_.copies;
  const auto each = plan_.shard_bytes(bucket.bytes, collectives_.size());
  under_way_ = true;
  if (complete == nullptr) device.record(bucket.ready, parts_.compute);
  device.wait(stream, complete == nullptr ? bucket.ready : *complete);
  // Zeros for gaps, padding and gradients that this rank does not have.
  device.zero(gathered_.get(), each * static_cast<std::uint64_t>(collectives_.size()), stream);
  for (const auto i : plan_.tensors(queued_)) {
    const auto& entry = parts_.binding.manifest.tensors[i];
    if (parameters_[i].gradient != nullptr)
      device.copy(gathered_.get() + (plan_.place(i) - bucket.bytes.first), parameters_[i].gradient,
                  entry.elements() * session::bytes_of(bucket.element), Direction::on_device, stream);
  }
  queued_ = skip_frozen(queued_ + 1);
  if (!collectives_.reduce_scatter(gathered_.get(), sum_.get(), each / session::bytes_of(bucket.element),
                                   session::dtype_of(bucket.element), ReduceOp::sum, stream))
    return false;
  if (bucket.shard.count() != 0)
    device.copy(parts_.memory + bucket.shard.first, sum_.get(), bucket.shard.count(), Direction::to_host,
                stream);
  device.record(bucket.arrived, stream);
  return true;
}

bool GradientShards::finish() {
  if (left()) return false;
  while (queued_ < buckets_.size())
    if (!queue_next(nullptr)) return false;
  parts_.device.record(computed_, parts_.compute);
  for (const auto& bucket : buckets_) {
    if (!bucket.is_trained) continue;
    if (!collectives_.wait(bucket.arrived)) return false;
    // While the next bucket is on the way.
    parts_.binding.gradient_places.shard(bucket.shard, parts_.memory + bucket.shard.first);
  }
  if (!collectives_.wait(computed_)) return false;
  under_way_ = false;
  return true;
}

std::vector<std::vector<std::size_t>> GradientShards::buckets() const {
  std::vector<std::vector<std::size_t>> lists;
  for (std::size_t i = 0; i < buckets_.size(); ++i)
    lists.emplace_back(plan_.tensors(i).begin(), plan_.tensors(i).end());
  return lists;
}

}  // namespace accelmgr::device
