// One device of this process, by the table of its runtime: streams, events, memory and registrations that end
// with their owners, and calls that throw.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "base/cuda/error.hpp"
#include "base/cuda/runtime.hpp"
#include "base/timing.hpp"
#include "base/unmovable.hpp"
#include "base/waiter.hpp"

namespace accelmgr::device {

class Device;

/// Gives a resource back through a function of the table, unless the device was given up.
template <auto function>
struct Release {
  const Device* device = nullptr;
  template <class T>
  void operator()(T* resource) const noexcept;
};

using Stream = std::unique_ptr<CUstream_st, Release<&Runtime::stream_destroy>>;
using Event = std::unique_ptr<CUevent_st, Release<&Runtime::event_destroy>>;
using Memory = std::unique_ptr<std::byte, Release<&Runtime::free>>;
/// CPU memory that the driver has allocated: the device copies from and to it by itself.
using HostMemory = std::unique_ptr<std::byte, Release<&Runtime::host_free>>;
/// A registration by which CPU memory with another owner becomes such memory.
using Registration = std::unique_ptr<std::byte, Release<&Runtime::host_unregister>>;

/// Used by one thread. All members that are not noexcept throw DeviceError.
/// Requires: a Device outlives what it made.
class Device : base::Unmovable {
 public:
  /// Makes `id` the device of the calling thread. The table is copied.
  Device(const Runtime& runtime, int id);

  /// Names the GPU on its machine: "0000:3b:00.0". The parts of a GPU that is divided have one name.
  std::string pci_bus_id() const;
  /// A stream that does not wait for the default stream.
  Stream make_stream() const;
  Event make_event() const;
  Memory allocate(std::size_t bytes) const;
  HostMemory allocate_on_host(std::size_t bytes) const;
  /// Registers the pages that `memory` touches. `flags` is register_read_write or register_read_only.
  Registration register_pages(std::span<std::byte> memory, unsigned flags) const;

  /// The event happens when `stream` has done what was queued so far.
  void record(const Event& event, StreamHandle stream) const;
  /// The event happens in each launch of the graph, when the launch has done what was recorded so far. So a
  /// copy can wait for one gradient, though a launch queues the whole backward pass.
  /// Requires: `stream` is being recorded as a graph.
  void record_in_graph(const Event& event, StreamHandle stream) const;
  /// What is queued on `stream` from now on begins after the event.
  void wait(StreamHandle stream, const Event& event) const;
  /// Queues a copy.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes, Direction direction,
            StreamHandle stream) const;
  /// Queues a fill of the device's memory with zeros.
  void zero(std::byte* memory, std::size_t bytes, StreamHandle stream) const;
  /// Whether the event has happened.
  bool happened(const Event& event) const;

  /// Waits until the event has happened. Returns false as soon as the waiter does not want the result. After
  /// `timeout_s` the device counts as hanging: it is given up.
  bool wait(const Event& event, base::Waiter& waiter, double timeout_s);
  /// Throws what the device has met so far: an error of earlier work is reported by a later call.
  void look() const;
  /// Waits until `stream` is idle. A device that needs longer than `within_s` is given up. For destructors,
  /// and for work that was left.
  void settle(StreamHandle stream, double within_s = timing::device_settles_s) noexcept;

  /// No further call is made: some calls wait for the device's work, for ever if the device hangs. The end of
  /// the process gives the memory back.
  void give_up() noexcept { given_up_ = true; }
  bool given_up() const noexcept { return given_up_; }
  const Runtime& runtime() const noexcept { return runtime_; }

 private:
  /// Throws unless `code` is that of success.
  void check(const char* function, Code code) const;
  /// Throws if the device was given up.
  void check_usable(const char* function) const;

  Runtime runtime_;
  int id_;
  bool given_up_ = false;
};

template <auto function>
template <class T>
void Release<function>::operator()(T* resource) const noexcept {
  if (!device->given_up()) (device->runtime().*function)(resource);
}

}  // namespace accelmgr::device
