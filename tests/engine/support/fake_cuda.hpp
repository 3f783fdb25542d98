// A CUDA runtime that executes on the host. Streams are queues that are worked off late, in any order that
// the events allow: a wait that is missing gives wrong numbers. It knows which host memory is registered,
// fails on demand, and tells what was not given back.
//
// It cannot prove bandwidth, overlap, or how a real device fails. Torch computes on the CPU beside it, so no
// test finds a copy that should wait for a kernel of torch, or has run libtorch's streams, allocator,
// generator and autocast on a device.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/cuda/runtime.hpp"
#include "fake_library.hpp"

namespace accelmgr::test {

/// One process has at most one at a time, as a process has one driver.
class FakeCuda : public FakeLibrary<device::Code> {
 public:
  enum class Execution {
    stepped,  ///< Nothing happens until the host polls. Each poll executes one operation of a random stream.
    threads,  ///< Each stream has a thread, which dawdles for random times.
    lazy,     ///< Nothing happens until the host polls. Each poll executes an operation that its event needs.
  };
  /// The waiter of a Wait: this, or the number of a stream.
  static constexpr int host = -1;
  /// Streams and events have numbers in the order in which they were made, from 0 on.
  struct Wait {
    int waiter, event;
    auto operator<=>(const Wait&) const = default;
  };
  struct Held {
    std::size_t streams = 0, events = 0, registrations = 0, allocations = 0;
    bool operator==(const Held&) const = default;
  };

  /// What one call of a polled kernel has done.
  enum class Progress { none, some, done };

  explicit FakeCuda(Execution execution, std::uint64_t seed = 0);
  ~FakeCuda();
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;

  /// The table of the fake.
  static device::Runtime runtime();
  /// The one of this process. There must be one.
  static FakeCuda& of_process();
  /// Queues a kernel.
  void launch(device::StreamHandle stream, std::function<void()> kernel);
  /// From now on any memory may be the device's: tensors on the CPU stand in for those on a device.
  void take_any_memory() { write(any_memory_, true); }

  /// Executes what is queued on the stream with that number, and what it waits for. A library that calls this
  /// computes as late as kernels on that stream. Returns early if the device hangs.
  void catch_up(int stream);

  /// Queues a kernel that waits for something else than this device. At the front of its stream it is called
  /// again and again until it is done. It must not block.
  void launch_polled(device::StreamHandle stream, std::function<Progress()> kernel);
  bool is_device_memory(const void* memory, std::size_t bytes);

  /// What a stream was asked for while it was recorded.
  class Graph;
  /// From now on the stream executes nothing, and what it is asked for becomes part of a graph: kernels,
  /// copies and fills within the device, and events of the graph. Everything else is refused.
  void begin_graph(device::StreamHandle stream);
  std::shared_ptr<Graph> end_graph(device::StreamHandle stream);
  /// The operations that the graph under way has so far.
  std::size_t graph_size(device::StreamHandle stream);
  /// Queues the operations from `first` to `last`, without that one.
  void launch(device::StreamHandle stream, const Graph& graph, std::size_t first, std::size_t last);
  void launch(device::StreamHandle stream, const Graph& graph);

  // Faults.

  /// The operation after the next `operations` ones breaks the device: it and every later one are left out,
  /// and all calls report `code`.
  void break_after(int operations, device::Code code) {
    locked([&] { until_break_ = operations, break_code_ = code; });
  }
  /// The device is broken from now on, as by an access to memory of a peer that is gone.
  void break_now(device::Code code);
  /// Streams do nothing after the next `operations` operations.
  void hang_after(int operations) { write(until_hang_, operations); }
  /// A device that hangs goes on after all: it was only slow.
  void go_on();

  // What the test looks at.

  /// All waits so far: of streams for events, and of the host, that is, its polls.
  std::set<Wait> waits() { return read(waits_); }
  /// As if this wait were not in the code.
  void leave_out(const Wait& wait) {
    locked([&] { left_out_.insert(wait); });
  }
  Held held() {
    return locked([&] {
      return Held{live_streams_, live_events_, registrations_.size(), allocations_.size()};
    });
  }
  /// Whether all streams have done what was queued.
  bool has_settled();
  /// Copies between the device and host memory that was not registered. They are executed before the call
  /// returns.
  int unregistered_copies() { return read(unregistered_copies_); }
  /// Calls that would have waited for ever for a device that hangs.
  int endless_waits() { return read(endless_waits_); }
  /// Registrations that ended while a copy of their memory was queued. CUDA does not say what happens then.
  int early_unregistrations() { return read(early_unregistrations_); }
  /// The bytes that copies in that direction were queued for, so far.
  std::size_t copied(device::Direction direction) {
    return locked([&] { return copied_[direction]; });
  }

 private:
  friend struct FakeFunctions;

  /// One recording of an event.
  struct Recording {
    bool happened = false;
  };
  struct EventState {
    int number = 0;
    std::shared_ptr<Recording> last;  ///< Null: never recorded.
  };
  struct Operation {
    std::function<void()> work;
    std::shared_ptr<Recording> records, waits_for;
    const std::byte* host = nullptr;  ///< The host's memory in a copy.
    std::function<Progress()> polled{};
    std::uint64_t upload = 0;  ///< A copy to the device: its number, in the order of the calls.
  };
  struct StreamState {
    int number = 0;
    int device = 0;  ///< What waits for a device waits for its streams only.
    bool destroyed = false;
    bool busy = false;
    const std::byte* busy_with = nullptr;  ///< Operation::host of the operation that is executed.
    std::deque<Operation> queue;
    std::shared_ptr<Graph> graph{};  ///< Null: the stream is not being recorded.
    std::thread thread;
  };
  using Lock = std::unique_lock<std::mutex>;

  device::Code enter(const char* function);
  StreamState& state_of(device::StreamHandle stream);
  EventState& state_of(device::EventHandle event);
  void queue(StreamState& stream, Operation operation);
  device::Code compute(StreamState& stream, std::function<void()> kernel);
  void record(StreamState& stream, EventState& event);
  static bool may_begin(const StreamState& stream);
  void execute(StreamState& stream, const std::function<void()>& work, Lock& lock);
  bool execute_front(StreamState& stream, Lock& lock);
  bool step(Lock& lock);
  bool step_towards(const Recording& wanted, Lock& lock);
  StreamState& next_upload(StreamState& stream);
  void work_off(StreamState& stream);
  bool idle(int device) const;
  bool drain(Lock& lock, const std::function<bool()>& done);
  bool is_registered(const void* memory, std::size_t bytes) const;
  bool is_copied(const std::byte* memory, std::size_t bytes) const;
  bool is_of_device(const void* memory, std::size_t bytes) const;

  device::Code copy(std::byte* to, const std::byte* from, std::size_t bytes, device::Direction direction,
                    device::StreamHandle stream);
  device::Code fill(std::byte* memory, int byte, std::size_t bytes, device::StreamHandle stream);
  device::Code query(device::EventHandle event);
  device::Code release(void* memory);

  const Execution execution_;
  std::condition_variable changed_;
  // Guarded by the mutex.
  std::mt19937_64 random_;
  std::uint64_t uploads_ = 0;
  StreamState* stepped_ = nullptr;  ///< The stream of the last step().
  bool ending_ = false;
  std::vector<std::unique_ptr<StreamState>> streams_;  ///< Handles are addresses; none is used twice.
  std::vector<std::unique_ptr<EventState>> events_;
  std::map<std::byte*, std::vector<std::byte>> allocations_;
  std::map<std::byte*, int> devices_;  ///< The device of each allocation.
  std::map<std::byte*, std::size_t> registrations_;
  std::size_t live_events_ = 0, live_streams_ = 0;
  int until_break_ = -1, until_hang_ = -1;  ///< Operations; -1: never.
  device::Code break_code_ = 0, broken_ = 0;
  bool hangs_ = false;
  bool any_memory_ = false;
  std::set<Wait> waits_, left_out_;
  std::map<device::Direction, std::size_t> copied_;
  int unregistered_copies_ = 0, endless_waits_ = 0, early_unregistrations_ = 0;
};

}  // namespace accelmgr::test
