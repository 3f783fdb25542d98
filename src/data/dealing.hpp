// Which element goes where: pure functions, so that loader, layout and tests cannot disagree.
#pragma once

#include <cstdint>

namespace accelmgr::data {

/// The device that element `element` (from 0, in the order of the source) belongs to: always, whatever a
/// device has left to do.
constexpr int device_of(std::uint64_t element, int nprocs) {
  return static_cast<int>(element % static_cast<std::uint64_t>(nprocs));
}

/// Batch slots of a device's ring: those of the step under way, which are released only at its commit, and
/// enough for `prefetch` elements on top.
constexpr std::uint64_t batch_slots(int grad_accumulation_steps, int prefetch, int batch_size_per_device) {
  const auto accumulation = static_cast<std::uint64_t>(grad_accumulation_steps);
  const auto ahead = static_cast<std::uint64_t>(prefetch);
  const auto batch_size = static_cast<std::uint64_t>(batch_size_per_device);
  return accumulation + (ahead + batch_size - 1) / batch_size;
}

}  // namespace accelmgr::data
