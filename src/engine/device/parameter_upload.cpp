#include "engine/device/parameter_upload.hpp"

#include <unistd.h>

#include <algorithm>

#include "base/log.hpp"

namespace accelmgr::device {
namespace {

std::uintptr_t begin_of(std::span<std::byte> range) { return reinterpret_cast<std::uintptr_t>(range.data()); }
std::uintptr_t end_of(std::span<std::byte> range) { return begin_of(range) + range.size(); }

}  // namespace

std::vector<std::span<std::byte>> merge_pages(std::vector<std::span<std::byte>> ranges,
                                              std::size_t page_bytes) {
  std::ranges::sort(ranges, {}, begin_of);
  std::vector<std::span<std::byte>> merged;
  for (const auto& range : ranges) {
    if (range.empty()) continue;
    // The page behind the last one, counted from 0.
    const auto end_page = merged.empty() ? 0 : (end_of(merged.back()) + page_bytes - 1) / page_bytes;
    if (merged.empty() || begin_of(range) / page_bytes > end_page) {
      merged.push_back(range);
      continue;
    }
    const auto end = std::max(end_of(merged.back()), end_of(range));
    merged.back() = {merged.back().data(), end - begin_of(merged.back())};
  }
  return merged;
}

ParameterUpload::ParameterUpload(Device& device, const replica::Binding& binding,
                                 std::span<std::byte* const> targets, StreamHandle compute)
    : device_(device), manifest_(binding.manifest), source_(binding.parameters), compute_(compute) {
  all_.resize(binding.places.size());
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const auto& entry = manifest_.tensors[i];
    if (targets[i] != nullptr)
      all_[i] = {targets[i], binding.places[i].data, entry.count * size_of(entry.runner_dtype)};
  }
  source_.built();
  register_master();
  copies_ = device.make_stream();
  loaded_ = device.make_event();
}

ParameterUpload::~ParameterUpload() { device_.settle(copies_.get()); }

// Runners map the master read-only, and CUDA registers such memory only for reading. A driver that cannot
// register it still copies from it through a buffer of its own, at an eighth of the speed.
void ParameterUpload::register_master() {
  std::vector<std::span<std::byte>> ranges;
  for (const auto& copy : all_)
    if (copy.to != nullptr) ranges.emplace_back(copy.from, copy.bytes);
  try {
    for (const auto range : merge_pages(std::move(ranges), static_cast<std::size_t>(sysconf(_SC_PAGESIZE))))
      registrations_.push_back(device_.register_pages(range, register_read_only));
  } catch (const DeviceError& error) {
    base::log().info("parameters go to the device more slowly, because their memory is not registered: {}",
                     error.what());
  }
}

void ParameterUpload::join(DeviceCollectives& collectives) {
  session::ShardPlan plan(manifest_, session::ShardPlan::Of::parameters);
  std::uint64_t most = 1;
  for (const auto& bucket : plan.buckets())
    most = std::max(most, plan.shard_bytes(bucket, collectives.size()));
  const auto bytes = most * static_cast<std::uint64_t>(collectives.size());
  team_.emplace(Team{collectives, std::move(plan), device_.allocate(bytes)});
}

void ParameterUpload::leave() { team_.reset(); }

/// Returns false if the communicator was aborted, because nobody wants the parameters.
bool ParameterUpload::load_shards() {
  for (std::size_t b = 0; b < team_->plan.buckets().size(); ++b)
    if (std::ranges::any_of(team_->plan.tensors(b), [&](std::size_t i) { return source_.is_stale(i); }) &&
        !load_shard(b))
      return false;
  return true;
}

bool ParameterUpload::load_shard(std::size_t b) {
  auto& [collectives, plan, gathered] = *team_;
  const auto& bucket = plan.buckets()[b];
  const auto each = plan.shard_bytes(bucket, collectives.size());
  const auto shard = plan.shard(bucket, collectives.rank(), collectives.size());
  auto* own = gathered.get() + static_cast<std::uint64_t>(collectives.rank()) * each;
  for (const auto i : plan.tensors(b)) {
    const auto& copy = all_[i];
    const auto place = plan.place(i);
    const auto begin = std::max(shard.first, place), end = std::min(shard.end, place + copy.bytes);
    if (begin < end)
      device_.copy(own + (begin - shard.first), copy.from + (begin - place), end - begin,
                   Direction::to_device, copies_.get());
  }
  if (!collectives.all_gather(own, gathered.get(), each, copies_.get())) return false;
  for (const auto i : plan.tensors(b))
    if (const auto& copy = all_[i]; copy.to != nullptr)
      device_.copy(copy.to, gathered.get() + (plan.place(i) - bucket.first), copy.bytes, Direction::on_device,
                   copies_.get());
  return true;
}

void ParameterUpload::load() {
  if (team_) {
    if (!load_shards()) return;
  } else {
    for (std::size_t i = 0; i < all_.size(); ++i)
      if (const auto& copy = all_[i]; copy.to != nullptr && source_.is_stale(i))
        device_.copy(copy.to, copy.from, copy.bytes, Direction::to_device, copies_.get());
  }
  device_.record(loaded_, copies_.get());
  device_.wait(compute_, loaded_);
}

}  // namespace accelmgr::device
