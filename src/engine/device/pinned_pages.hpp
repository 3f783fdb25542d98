// Host memory that a device copies from and to by itself.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/cuda/device.hpp"

namespace accelmgr::device {

/// Whole pages, which no other registration touches. A device that was given up may still write to them: then
/// the end of the process frees them.
class PinnedPages {
 public:
  /// No memory yet.
  PinnedPages() = default;
  ~PinnedPages() { give_back(); }
  PinnedPages(const PinnedPages&) = delete;
  PinnedPages& operator=(const PinnedPages&) = delete;

  /// Makes it at least `bytes` large, all zero. No copy from it or to it may be under way. The
  /// device outlives it. Throws DeviceError and std::bad_alloc.
  void grow(const Device& device, std::size_t bytes);
  std::span<std::byte> span() const noexcept {
    return {pages_.get(), pages_ ? pages_.get_deleter().bytes : 0};
  }

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(std::byte* pages) const noexcept;
  };

  void give_back() noexcept;

  const Device* device_ = nullptr;
  std::unique_ptr<std::byte, Unmap> pages_;
  Registration registration_;
};

}  // namespace accelmgr::device
