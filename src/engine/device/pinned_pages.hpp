// CPU memory that a device copies from and to by itself.
#pragma once

#include <cstddef>
#include <span>

#include "base/cuda/device.hpp"

namespace accelmgr::device {

/// A device that was given up may still write to it: then the end of the process frees it.
class PinnedPages {
 public:
  /// Makes it at least `bytes` large, all zero. Before the first call it has no memory. Throws DeviceError.
  /// Requires: no copy from it or to it is under way; the device outlives it.
  void grow(const Device& device, std::size_t bytes);
  std::span<std::byte> span() const noexcept { return {memory_.get(), bytes_}; }

 private:
  HostMemory memory_;
  std::size_t bytes_ = 0;
};

}  // namespace accelmgr::device
