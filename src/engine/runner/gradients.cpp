#include "engine/runner/gradients.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "accelmgr/errors.hpp"
#include "base/fault_point.hpp"
#include "engine/session/kernels.hpp"

namespace accelmgr::runner {
namespace {

// A large gradient is not read again before the reduction, so it is stored past the cache: backward keeps the
// cache for itself. A slab of at most cached_slab_bytes may stay in the cache until the reduction.
constexpr std::uint64_t non_temporal_bytes = std::uint64_t{1} << 20;
constexpr std::uint64_t cached_slab_bytes = std::uint64_t{8} << 20;

std::size_t non_temporal_from(const session::Header& header) {
  return header.slab_bytes > cached_slab_bytes ? non_temporal_bytes : std::numeric_limits<std::size_t>::max();
}

}  // namespace

void Gradients::begin(std::uint64_t attempt) {
  attempt_ = attempt;
  nonfinite_.clear();
  range_ = {};
}

void Gradients::capture(std::size_t index, const void* gradient) {
  const auto& entry = trained(index);
  auto* place = runner_.slab() + entry.slab;
  const auto& kernels = session::best_kernels();
  note(index, runner_.tags()[index].load() == attempt_
                  ? kernels.capture_add(place, gradient, entry.elements(), entry.types)
                  : kernels.capture_copy(place, gradient, entry.elements(), entry.types,
                                         non_temporal_from(runner_.session().header())));
  keep(index);
}

void Gradients::arrived(std::span<const std::size_t> indices) {
  for (const auto index : indices) {
    const auto& entry = trained(index);
    if (runner_.tags()[index].load() == attempt_)
      throw ModelError(fmt::format("the gradient of '{}' was handed over twice by a device", entry.name));
    keep(index);
  }
}

void Gradients::keep(std::size_t index, std::uint64_t first, std::uint64_t end) {
  base::fault_point(base::FaultPhase::gradient_capture);
  runner_.tags()[index].store(attempt_, first, end);
}

void Gradients::note(std::size_t index, double magnitude) {
  const auto range = session::range_of(magnitude, trained(index).types);
  range_ = {std::max(range_.sum, range.sum), std::max(range_.master, range.master)};
  if (std::isfinite(magnitude)) return;
  if (std::ranges::find(nonfinite_, index) == nonfinite_.end()) nonfinite_.push_back(index);
}

void Gradients::look_at(std::size_t index, const void* gradient) {
  const auto& entry = trained(index);
  note(index, session::best_kernels().largest(gradient, entry.elements(), entry.types.gradient));
}

void Gradients::shard(const session::Bytes& shard, const std::byte* sums) {
  if (shard.end < shard.first || shard.end > plan_.bytes())
    throw ModelError(fmt::format("a shard of the bytes {} to {} was passed, but the gradients have {}",
                                 shard.first, shard.end, plan_.bytes()));
  const auto& kernels = session::best_kernels();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto& entry = entries_[i];
    const auto place = plan_.place(i);
    const auto each = session::bytes_of(entry.types.gradient);
    const auto tensor_end = place + entry.elements() * each;
    const auto begin = std::max(shard.first, place), end = std::min(shard.end, tensor_end);
    if (begin > end || (begin == end && entry.elements() > 0) || !is_trained(i) || !entry.has_room())
      continue;
    const auto* values = sums + (begin - shard.first);
    const auto first = (begin - place) / each, count = (end - begin) / each;
    auto* to = runner_.slab() + entry.slab + first * session::bytes_of(entry.types.slab);
    note(i, values == to ? kernels.largest(values, count, entry.types.slab)
                         : kernels.capture_copy(to, values, count, entry.types,
                                                non_temporal_from(runner_.session().header())));
    keep(i, first, end == tensor_end ? session::Tag::to_the_end : first + count);
  }
}

bool Gradients::is_trained(std::size_t index) const noexcept {
  return entries_[index].group != session::Group::frozen ||
         runner_.session().unfrozen()[index].load(std::memory_order_relaxed) != 0;
}

const session::TensorEntry& Gradients::entry_of(std::size_t index) const {
  if (index >= entries_.size())
    throw ModelError(fmt::format("a gradient was passed for parameter {}, but the model has {} parameters",
                                 index, entries_.size()));
  const auto& entry = entries_[index];
  if (!entry.has_room())
    throw ModelError(
        fmt::format("a gradient was passed for parameter '{}', which is {} and cannot be trained", entry.name,
                    name_of(entry.dtype)));
  return entry;
}

const session::TensorEntry& Gradients::trained(std::size_t index) const {
  const auto& entry = entry_of(index);
  if (!is_trained(index))
    throw ModelError(fmt::format(
        "a gradient of '{}' was passed, but the parameter is frozen: the host must unfreeze it", entry.name));
  return entry;
}

std::byte* Gradients::place_of(std::size_t index) const { return runner_.slab() + entry_of(index).slab; }

std::span<std::byte> Gradients::slab() const noexcept {
  return {runner_.slab(), runner_.session().header().bytes.slab};
}

std::vector<std::string> Gradients::nonfinite() const {
  std::vector<std::string> names;
  for (const auto index : nonfinite_) names.push_back(entries_[index].name);
  return names;
}

}  // namespace accelmgr::runner
