#include "engine/support/bound_replica.hpp"

#include "engine/replica/model.hpp"
#include "engine/session/layout.hpp"
#include "engine/session/strided.hpp"

namespace accelmgr::test {

void GradientSums::capture(std::size_t index, const void* gradient) {
  auto& sum = sums[index];
  sum.resize(manifest->tensors.at(index).count);
  for (std::size_t i = 0; i < sum.size(); ++i)
    sum[i] += dtype == DType::float64 ? static_cast<const double*>(gradient)[i]
                                      : double(static_cast<const float*>(gradient)[i]);
}

BoundReplica::BoundReplica(std::unique_ptr<replica::Replica> replica, std::uint64_t seed)
    : generator_(session::generator_bytes), replica_(std::move(replica)) {
  auto tensors = replica::tensors_of(replica_->describe());
  manifest_ = std::move(tensors.manifest);
  buffers_.resize(manifest_.place_buffers());
  sink_.manifest = &manifest_;
  sink_.dtype = tensors.parameters.at(0).dtype;
  const auto bytes = size_of(sink_.dtype);
  for (std::size_t i = 0; i < tensors.parameters.size(); ++i) {
    const auto& entry = manifest_.tensors[i];
    const auto& from = tensors.parameters[i];
    if (entry.shares >= 0) {
      auto* first = places_.at(static_cast<std::size_t>(entry.shares)).data;
      places_.push_back({first + entry.shared_offset * bytes, entry.strides});
      continue;
    }
    places_.push_back({pages(entry.count * bytes), entry.value_strides()});
    session::copy_strided(places_.back().data, places_.back().strides, from.data, from.strides, from.shape,
                          bytes);
  }
  replica_->bind(sink_.binding(manifest_, places_));
  replica_->seed(seed);
  save();
}

/// Whole pages, as the master has them: a device registers pages, and no page twice.
std::byte* BoundReplica::pages(std::size_t bytes) {
  constexpr std::uintptr_t page = 4096;
  memory_.emplace_back(session::align_up(bytes, page) + page);
  auto* begin = memory_.back().data();
  return begin + (page - reinterpret_cast<std::uintptr_t>(begin) % page) % page;
}

void BoundReplica::begin_attempt() {
  sink_.sums.clear();
  replica_->begin_attempt();
}

}  // namespace accelmgr::test
