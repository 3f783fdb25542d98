#include "device/gradient_shards.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "accelmgr/errors.hpp"

namespace accelmgr::device {

GradientShards::GradientShards(const Parts& parts, DeviceCollectives& collectives, session::RankMask team)
    : parts_(parts),
      collectives_(collectives),
      team_(team),
      plan_(parts.manifest, parts.element),
      element_bytes_(session::bytes_of(parts.element)),
      computed_(parts.device.make_event()),
      parameters_(parts.manifest.tensors.size()) {
  if (__builtin_popcount(team) != collectives.size())
    throw UsageError(fmt::format("a communicator of {} devices cannot serve a team of {}", collectives.size(),
                                 __builtin_popcount(team)));
  std::uint64_t most = 1;
  for (const auto& elements : plan_.buckets()) {
    for (const auto i : plan_.tensors(buckets_.size())) parameters_[i].bucket = buckets_.size();
    buckets_.push_back({.elements = elements,
                        .shard = plan_.shard(elements, collectives.rank(), collectives.size()),
                        .ready = parts.device.make_event(),
                        .arrived = parts.device.make_event()});
    most = std::max(most, plan_.shard_elements(elements, collectives.size()));
  }
  sum_ = parts.device.allocate(most * element_bytes_);
  gathered_ = parts.device.allocate(most * element_bytes_ * static_cast<std::uint64_t>(collectives.size()));
}

GradientShards::~GradientShards() {
  if (under_way_) collectives_.abort();
  parts_.device.settle(parts_.copies);  // An attempt that was left may still use the memory.
}

void GradientShards::begin_attempt() {
  if (under_way_) collectives_.abort();
  under_way_ = false;
  for (auto& parameter : parameters_) parameter.gradient = nullptr, parameter.complete = false;
  for (std::size_t i = 0; i < buckets_.size(); ++i) buckets_[i].incomplete = plan_.tensors(i).size();
  queued_ = 0;
}

/// Whether the attempt ended for this rank because nobody wants it.
bool GradientShards::left() { return collectives_.aborted() && !parts_.sink.wanted(); }

void GradientShards::written(std::size_t index, const std::byte* gradient, const Event* complete) {
  if (index >= parameters_.size())
    throw ModelError(fmt::format("a gradient was passed for parameter {}, but the model has {} parameters",
                                 index, parameters_.size()));
  auto& parameter = parameters_[index];
  const auto& name = parts_.manifest.tensors[index].name;
  if (parameter.bucket == nowhere)
    throw ModelError(fmt::format("a gradient of '{}' was passed, but the parameter is frozen", name));
  if (parameter.bucket < queued_)
    throw ModelError(fmt::format("the gradient of '{}' was written after its copy had been queued", name));
  parameter.gradient = gradient;
  if (!parts_.sink.last_micro_batch() || parameter.complete) return;
  parameter.complete = true;
  --buckets_[parameter.bucket].incomplete;
  if (!left()) queue_complete(complete);
}

void GradientShards::queue_complete(const Event* complete) {
  while (queued_ < buckets_.size() && buckets_[queued_].incomplete == 0)
    if (!queue_next(complete)) return;
}

/// Returns false if the sink no longer wants the attempt.
bool GradientShards::queue_next(const Event* complete) {
  const auto& bucket = buckets_[queued_];
  auto& device = parts_.device;
  auto* stream = parts_.copies;
  const auto each = plan_.shard_elements(bucket.elements, collectives_.size());
  under_way_ = true;
  if (complete == nullptr) device.record(bucket.ready, parts_.compute);
  device.wait(stream, complete == nullptr ? bucket.ready : *complete);
  // Gaps, padding and gradients that this rank does not have.
  device.zero(gathered_.get(), each * static_cast<std::uint64_t>(collectives_.size()) * element_bytes_,
              stream);
  for (const auto i : plan_.tensors(queued_)) {
    const auto& entry = parts_.manifest.tensors[i];
    if (parameters_[i].gradient != nullptr)
      device.copy(gathered_.get() + (entry.first - bucket.elements.first) * element_bytes_,
                  parameters_[i].gradient, entry.count * element_bytes_, Direction::on_device, stream);
  }
  ++queued_;
  if (!collectives_.reduce_scatter(gathered_.get(), sum_.get(), each, session::dtype_of(parts_.element),
                                   ReduceOp::sum, stream))
    return false;
  if (bucket.shard.count() != 0)
    device.copy(parts_.memory + bucket.shard.first * element_bytes_, sum_.get(),
                bucket.shard.count() * element_bytes_, Direction::to_host, stream);
  device.record(bucket.arrived, stream);
  return true;
}

bool GradientShards::finish() {
  if (left()) return false;
  while (queued_ < buckets_.size())
    if (!queue_next(nullptr)) return false;
  parts_.device.record(computed_, parts_.compute);
  for (const auto& bucket : buckets_) {
    if (!collectives_.wait(bucket.arrived)) return false;
    // While the next bucket is on the way. A rank without a shard says that it is of the team, too.
    parts_.sink.shard(team_, bucket.shard.first, bucket.shard.count(),
                      parts_.memory + bucket.shard.first * element_bytes_);
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
