#include "runner/gradients.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "accelmgr/errors.hpp"
#include "base/fault_point.hpp"
#include "session/kernels.hpp"

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
}

void Gradients::capture(std::size_t index, const void* gradient) {
  auto* place = place_of(index);
  const auto& header = runner_.session().header();
  const session::ElementTypes types{header.element, header.slab_element};
  const auto& kernels = session::best_kernels();
  const auto count = entries_[index].count;
  keep(index, runner_.tags()[index].load(std::memory_order_relaxed) == attempt_
                  ? kernels.capture_add(place, gradient, count, types)
                  : kernels.capture_copy(place, gradient, count, types, non_temporal_from(header)));
}

void Gradients::arrived(std::size_t index) {
  const auto* place = place_of(index);
  const auto& entry = entries_[index];
  if (runner_.tags()[index].load(std::memory_order_relaxed) == attempt_)
    throw ModelError(fmt::format("the gradient of '{}' was handed over twice by a device", entry.name));
  keep(index, session::best_kernels().finite(place, entry.count, runner_.session().header().element));
}

void Gradients::keep(std::size_t index, bool finite) {
  base::fault_point(base::FaultPhase::gradient_capture);
  runner_.tags()[index].store(attempt_, std::memory_order_relaxed);
  if (!finite) note_nonfinite(index);
}

void Gradients::note_nonfinite(std::size_t index) {
  if (std::ranges::find(nonfinite_, index) == nonfinite_.end()) nonfinite_.push_back(index);
}

// Shards need no tags: a team has a value for every element.
void Gradients::shard(std::uint64_t first, std::uint64_t count, const void* sums) {
  const auto& header = runner_.session().header();
  const session::ElementTypes types{header.element, header.slab_element};
  if (first > header.elements || count > header.elements - first)
    throw ModelError(fmt::format("a shard of {} gradients from number {} on was passed, but the model has {}",
                                 count, first, header.elements));
  auto* place = runner_.slab() + first * session::slab_bytes_of(types);
  const auto& kernels = session::best_kernels();
  const bool finite = sums == place
                          ? kernels.finite(place, count, header.element)
                          : kernels.capture_copy(place, sums, count, types, non_temporal_from(header));
  base::fault_point(base::FaultPhase::gradient_capture);
  if (finite) return;
  const auto bytes = session::bytes_of(header.element);
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto begin = std::max(first, entries_[i].first);
    const auto end = std::min(first + count, entries_[i].first + entries_[i].count);
    if (begin >= end) continue;
    const auto* values = static_cast<const std::byte*>(sums) + (begin - first) * bytes;
    if (!kernels.finite(values, end - begin, header.element)) note_nonfinite(i);
  }
}

std::byte* Gradients::place_of(std::size_t index) const {
  if (index >= entries_.size())
    throw ModelError(fmt::format("a gradient was passed for parameter {}, but the model has {} parameters",
                                 index, entries_.size()));
  const auto& header = runner_.session().header();
  return runner_.slab() +
         entries_[index].first * session::slab_bytes_of({header.element, header.slab_element});
}

std::span<std::byte> Gradients::slab() const noexcept {
  const auto& header = runner_.session().header();
  if (header.slab_element != session::SlabElement::same) return {};
  return {runner_.slab(), header.elements * session::bytes_of(header.element)};
}

std::vector<std::string> Gradients::nonfinite() const {
  std::vector<std::string> names;
  for (const auto index : nonfinite_) names.push_back(entries_[index].name);
  return names;
}

}  // namespace accelmgr::runner
