// Copies micro-batches to a device while the one before computes.
//
//   runner's thread  writes slot 0 .. writes slot 1 .. awaits copied[0], writes slot 0 ..
//   copy stream      copies slot 0 | copied[0] .. copies slot 1 | copied[1]
//   compute stream   waits for copied[0], computes .. waits for copied[1], computes
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/cuda/device.hpp"
#include "base/unmovable.hpp"
#include "base/waiter.hpp"
#include "engine/device/pinned_pages.hpp"

namespace accelmgr::device {

/// Used by one thread. Device, waiter and both streams outlive it. Members throw DeviceError.
class BatchUpload : base::Unmovable {
 public:
  /// A part of the staged memory, and where on the device it goes.
  struct Part {
    std::byte* to = nullptr;
    std::size_t offset = 0, bytes = 0;
  };

  /// Copies are queued on `copies`, kernels on `compute`. A wait for the device that takes longer than
  /// `timeout_s` means that it hangs.
  BatchUpload(Device& device, base::Waiter& waiter, StreamHandle copies, StreamHandle compute,
              double timeout_s);
  ~BatchUpload();

  /// At least `bytes` of CPU memory for what the next load() copies. Waits until the device has read what
  /// lay there before. nullopt if the waiter no longer wants it.
  std::optional<std::span<std::byte>> stage(std::size_t bytes);

  /// Queues copies of the staged memory. Work that is queued on the compute stream from now on begins after
  /// them. The copies wait for nothing and may overtake work that is queued already.
  /// Requires: no work that is queued uses their targets.
  void load(std::span<const Part> parts);
  /// As load(), for targets that work on the compute stream may still use: the copies come after that work.
  void load_behind(std::span<const Part> parts);

 private:
  struct Slot {
    PinnedPages pages;
    Event copied;
    bool used = false;
  };

  void copy(std::span<const Part> parts, StreamHandle stream);

  Device& device_;
  base::Waiter& waiter_;
  StreamHandle copies_, compute_;
  double timeout_s_;
  std::array<Slot, 2> slots_;
  std::size_t next_ = 0;
};

/// Copies results of an attempt from a device. Used by one thread. Device and stream outlive it. Members
/// throw DeviceError.
class Results : base::Unmovable {
 public:
  struct Part {
    const std::byte* from = nullptr;
    std::size_t offset = 0, bytes = 0;  ///< In CPU memory.
  };

  Results(Device& device, StreamHandle compute) : device_(device), compute_(compute) {}
  ~Results();

  /// Queues the copies behind the work of the compute stream. Returns at least `bytes` of memory, which has
  /// the values when that stream is done and stays until the next call.
  std::span<const std::byte> read(std::span<const Part> parts, std::size_t bytes);

 private:
  Device& device_;
  StreamHandle compute_;
  /// Only the last one is used. An attempt that was left may still write to earlier ones, which were too
  /// small.
  std::vector<std::unique_ptr<PinnedPages>> pages_;
};

}  // namespace accelmgr::device
