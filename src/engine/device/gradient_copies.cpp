#include "engine/device/gradient_copies.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"

namespace accelmgr::device {

GradientCopies::GradientCopies(Device& device, const replica::Binding& binding, StreamHandle compute,
                               double timeout_s)
    : device_(device),
      binding_(binding),
      entries_(binding.manifest.tensors),
      compute_(compute),
      timeout_s_(timeout_s),
      staged_(binding.gradient_places.slab().empty()),
      plan_(binding.manifest),
      slab_serves_teams_(plan_.is_of_slabs(binding.manifest)),
      parameters_(binding.manifest.tensors.size()) {
  for (const auto& entry : entries_)
    bytes_.push_back(entry.has_room() ? entry.elements() * session::bytes_of(entry.types.gradient) : 0);
  if (!staged_) register_slab();
  make_room();
  copies_ = device.make_stream();
  computed_ = device.make_event();
  // Until the first attempt shows the order: backward usually comes to the last parameters first.
  std::vector<std::size_t> reversed(parameters_.size());
  std::iota(reversed.rbegin(), reversed.rend(), std::size_t{0});
  cut(reversed);
}

GradientCopies::~GradientCopies() {
  team_.reset();
  settle();
}

void GradientCopies::settle() noexcept {
  device_.settle(compute_);
  device_.settle(copies_.get());
}

void GradientCopies::register_slab() {
  try {
    registration_ = device_.register_pages(binding_.gradient_places.slab(), register_read_write);
  } catch (const DeviceError& error) {
    base::log().info("gradients go through memory of the driver, because the session's is not registered: {}",
                     error.what());
    staged_ = true;
  }
}

std::byte* GradientCopies::team_memory() const {
  return (staged_ || !slab_serves_teams_ ? staging_.span() : binding_.gradient_places.slab()).data();
}

bool GradientCopies::rounds(std::size_t index) const {
  const auto& types = entries_[index].types;
  return !staged_ && team_ == nullptr && types.slab != types.gradient;
}

/// Makes the staging memory large enough for what is trained now. The registered slab has no room for an
/// unfrozen parameter. A copy to other memory blocks this thread, and CUDA refuses one that begins in the
/// last registered page. So gradients are staged from then on.
void GradientCopies::make_room() {
  std::uint64_t end = 1;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i].has_room() || !binding_.gradients.is_trained(i)) continue;
    end = std::max(end, plan_.place(i) + bytes_[i]);
    staged_ = staged_ || entries_[i].group == session::Group::frozen;
  }
  const bool needed = staged_ || (team_ != nullptr && !slab_serves_teams_);
  if (needed && end > staging_.span().size()) staging_.grow(device_, end);
}

/// Staged gradients lie as devices have them: a shard is one range.
void GradientCopies::place_gradients() {
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (entries_[i].has_room())
      parameters_[i].place =
          staged_ ? staging_.span().data() + plan_.place(i) : binding_.gradient_places.place_of(i);
}

void GradientCopies::join(DeviceCollectives& collectives) {
  leave();
  team_ = std::make_unique<GradientShards>(
      GradientShards::Parts{device_, binding_, team_memory(), compute_, copies_.get()}, collectives);
}

void GradientCopies::leave() { team_.reset(); }

void GradientCopies::cut(std::span<const std::size_t> order) {
  buckets_.clear();
  session::BucketRule rule;
  for (const auto i : order) {
    if (rule.begins(bytes_[i]))
      buckets_.push_back({.parameters = {}, .ready = device_.make_event(), .arrived = device_.make_event()});
    parameters_[i].bucket = buckets_.size() - 1;
    buckets_.back().parameters.push_back(i);
  }
}

void GradientCopies::begin_work() noexcept {
  if (begun_ == 0) begun_ = base::now_ns();
}

bool GradientCopies::await_left_work() {
  if (begun_ == 0) return true;
  if (team_ != nullptr) team_->abandon();
  try {
    for (auto* const stream : {compute_, copies_.get()}) {
      device_.record(computed_, stream);
      const auto left_s = timeout_s_ - timing::seconds(base::now_ns() - begun_);
      if (!device_.wait(computed_, binding_.progress, std::max(0.0, left_s))) return false;
    }
  } catch (const DeviceError& error) {
    if (!device_.given_up()) throw;
    throw DeviceError(
        fmt::format("{}: the device hangs: it has not ended within {} s the work of an earlier attempt",
                    error.function(), timeout_s_),
        error.function(), error.code());
  }
  begun_ = 0;
  return true;
}

bool GradientCopies::begin_attempt() {
  if (!await_left_work()) return false;
  make_room();
  place_gradients();
  if (team_ != nullptr) {
    team_->move(team_memory());
    team_->begin_attempt();
  }
  for (auto& parameter : parameters_) parameter.gradient = nullptr, parameter.complete = false;
  for (auto& bucket : buckets_) bucket.incomplete = bucket.parameters.size(), bucket.queued = false;
  on_the_way_.clear();
  order_.clear();
  return true;
}

void GradientCopies::written(std::size_t index, const std::byte* gradient, const Event* complete) {
  if (team_ != nullptr) return team_->written(index, gradient, complete);
  if (index >= parameters_.size())
    throw ModelError(fmt::format("a gradient was passed for parameter {}, but the model has {} parameters",
                                 index, parameters_.size()));
  if (!entries_[index].has_room() || !binding_.gradients.is_trained(index))
    throw ModelError(
        fmt::format("a gradient of '{}' was passed, but the parameter is frozen", entries_[index].name));
  auto& parameter = parameters_[index];
  auto& bucket = buckets_[parameter.bucket];
  if (bucket.queued)
    throw ModelError(
        fmt::format("the gradient of '{}' was written after its copy had been queued", entries_[index].name));
  if (parameter.gradient == nullptr) order_.push_back(index);
  parameter.gradient = gradient;
  if (!binding_.progress.last_micro_batch() || parameter.complete) return;
  parameter.complete = true;
  if (--bucket.incomplete == 0) queue(parameter.bucket, complete);
}

void GradientCopies::queue(std::size_t index, const Event* complete) {
  auto& bucket = buckets_[index];
  bucket.queued = true;
  if (complete == nullptr) device_.record(bucket.ready, compute_);
  device_.wait(copies_.get(), complete == nullptr ? bucket.ready : *complete);
  for (const auto i : bucket.parameters)
    if (parameters_[i].gradient != nullptr)
      device_.copy(parameters_[i].place, parameters_[i].gradient,
                   rounds(i) ? entries_[i].slab_bytes() : bytes_[i], Direction::to_host, copies_.get());
  device_.record(bucket.arrived, copies_.get());
  on_the_way_.push_back(index);
}

bool GradientCopies::finish() {
  const bool done = team_ != nullptr ? team_->finish() : finish_alone();
  if (done) begun_ = 0;
  return done;
}

bool GradientCopies::finish_alone() {
  const auto is_written = [&](std::size_t i) { return parameters_[i].gradient != nullptr; };
  for (std::size_t i = 0; i < buckets_.size(); ++i)
    if (!buckets_[i].queued && std::ranges::any_of(buckets_[i].parameters, is_written)) queue(i, nullptr);
  device_.record(computed_, compute_);
  for (const auto i : on_the_way_) {
    if (!device_.wait(buckets_[i].arrived, binding_.progress, timeout_s_)) return false;
    hand_over(buckets_[i]);  // While the next bucket is on the way.
  }
  if (!device_.wait(computed_, binding_.progress, timeout_s_)) return false;
  if (!ordered_) keep_order();
  return true;
}

void GradientCopies::hand_over(const Bucket& bucket) {
  arrived_.clear();
  for (const auto i : bucket.parameters) {
    if (parameters_[i].gradient == nullptr) continue;
    if (staged_) {
      binding_.gradients.capture(i, parameters_[i].place);
    } else {
      arrived_.push_back(i);
    }
  }
  if (!arrived_.empty()) binding_.gradient_places.arrived(arrived_);
}

// Parameters that the first attempt did not use come last: their buckets wait until finish().
void GradientCopies::keep_order() {
  auto order = order_;
  for (std::size_t i = parameters_.size(); i-- > 0;)
    if (parameters_[i].gradient == nullptr) order.push_back(i);
  cut(order);
  ordered_ = true;
}

std::vector<std::vector<std::size_t>> GradientCopies::buckets() const {
  if (team_ != nullptr) return team_->buckets();
  std::vector<std::vector<std::size_t>> lists;
  for (const auto& bucket : buckets_) lists.push_back(bucket.parameters);
  return lists;
}

}  // namespace accelmgr::device
