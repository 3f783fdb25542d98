#include "engine/support/fake_cuda.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/clock.hpp"

namespace accelmgr::test {

using device::Code;
namespace code = device::code;

namespace {

FakeCuda* current = nullptr;
thread_local int device_of_thread = 0;
// Device memory and the memory of a new allocation begin as NaN.
constexpr std::byte uninitialized{0xff};
constexpr std::uint64_t longest_dawdle = 64;  // Yields.
constexpr std::int64_t longest_dawdle_ns = 100'000;
constexpr std::chrono::microseconds poll_interval{50};  // Of a kernel that waits for another process.
constexpr Code recording_refuses = 900;                 // cudaErrorStreamCaptureUnsupported
constexpr std::size_t device_bytes = std::size_t{1} << 40;

template <class Range>
bool within(const Range& ranges, const void* memory, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(memory);
  return std::ranges::any_of(ranges, [&](const auto& range) {
    return begin >= range.first && begin + bytes <= range.first + range.second;
  });
}
template <class Range>
bool touches(const Range& ranges, const void* memory, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(memory);
  return std::ranges::any_of(ranges, [&](const auto& range) {
    return begin < range.first + range.second && range.first < begin + bytes;
  });
}

}  // namespace

class FakeCuda::Graph {
 public:
  struct Node {
    std::function<void()> kernel;
    EventState* event;  ///< Recorded, if it has no kernel.
  };
  std::vector<Node> nodes{};
};

/// The functions of the table.
struct FakeFunctions {
  static Code set_device(int device) {
    if (const auto failed = current->enter("cudaSetDevice")) return failed;
    device_of_thread = device;
    return code::success;
  }

  // Each device of the process has a number of its own. FAKE_CUDA_BUS is that of device 0, for processes that
  // have different GPUs.
  static Code pci_bus_id(char* text, int size, int device) {
    if (const auto failed = current->enter("cudaDeviceGetPCIBusId")) return failed;
    const char* first = std::getenv("FAKE_CUDA_BUS");
    std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0",
                  static_cast<unsigned>(device + (first == nullptr ? 0 : std::atoi(first))));
    return code::success;
  }

  static Code stream_create(device::StreamHandle* stream, unsigned) {
    if (const auto failed = current->enter("cudaStreamCreateWithFlags")) return failed;
    const std::lock_guard lock(current->mutex_);
    auto& state = *current->streams_.emplace_back(std::make_unique<FakeCuda::StreamState>());
    state.number = static_cast<int>(current->streams_.size()) - 1;
    state.device = device_of_thread;
    ++current->live_streams_;
    if (current->execution_ == FakeCuda::Execution::threads)
      state.thread = std::thread([&state] { current->work_off(state); });
    *stream = reinterpret_cast<device::StreamHandle>(&state);
    return code::success;
  }

  // What is queued goes on.
  static Code stream_destroy(device::StreamHandle stream) {
    if (const auto failed = current->enter("cudaStreamDestroy")) return failed;
    const std::lock_guard lock(current->mutex_);
    if (std::exchange(current->state_of(stream).destroyed, true)) return code::invalid_value;
    --current->live_streams_;
    return code::success;
  }

  static Code stream_wait_event(device::StreamHandle stream, device::EventHandle event, unsigned) {
    if (const auto failed = current->enter("cudaStreamWaitEvent")) return failed;
    const std::lock_guard lock(current->mutex_);
    auto& state = current->state_of(stream);
    const auto& waited = current->state_of(event);
    const FakeCuda::Wait wait{state.number, waited.number};
    if (state.graph != nullptr) return recording_refuses;
    current->waits_.insert(wait);
    if (waited.last != nullptr && !current->left_out_.contains(wait))
      current->queue(state, {.work = nullptr, .records = nullptr, .waits_for = waited.last});
    return code::success;
  }

  static Code event_create(device::EventHandle* event, unsigned) {
    if (const auto failed = current->enter("cudaEventCreateWithFlags")) return failed;
    const std::lock_guard lock(current->mutex_);
    auto& state = *current->events_.emplace_back(std::make_unique<FakeCuda::EventState>());
    state.number = static_cast<int>(current->events_.size()) - 1;
    ++current->live_events_;
    *event = reinterpret_cast<device::EventHandle>(&state);
    return code::success;
  }

  static Code event_destroy(device::EventHandle) {
    if (const auto failed = current->enter("cudaEventDestroy")) return failed;
    const std::lock_guard lock(current->mutex_);
    --current->live_events_;
    return code::success;
  }

  static Code event_record(device::EventHandle event, device::StreamHandle stream) {
    if (const auto failed = current->enter("cudaEventRecord")) return failed;
    const std::lock_guard lock(current->mutex_);
    if (current->state_of(stream).graph != nullptr) return recording_refuses;
    current->record(current->state_of(stream), current->state_of(event));
    return code::success;
  }

  static Code event_record_with_flags(device::EventHandle event, device::StreamHandle stream,
                                      unsigned flags) {
    if (const auto failed = current->enter("cudaEventRecordWithFlags")) return failed;
    const std::lock_guard lock(current->mutex_);
    const auto& graph = current->state_of(stream).graph;
    if (flags != device::event_of_a_graph || graph == nullptr) return code::invalid_value;
    graph->nodes.push_back({.kernel = nullptr, .event = &current->state_of(event)});
    return code::success;
  }

  static Code event_query(device::EventHandle event) {
    if (const auto failed = current->enter("cudaEventQuery")) return failed;
    return current->query(event);
  }

  static Code copy(void* to, const void* from, std::size_t bytes, device::Direction direction,
                   device::StreamHandle stream) {
    if (const auto failed = current->enter("cudaMemcpyAsync")) return failed;
    return current->copy(static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes, direction,
                         stream);
  }

  static Code fill(void* memory, int byte, std::size_t bytes, device::StreamHandle stream) {
    if (const auto failed = current->enter("cudaMemsetAsync")) return failed;
    return current->fill(static_cast<std::byte*>(memory), byte, bytes, stream);
  }

  static Code host_register(void* memory, std::size_t bytes, unsigned flags) {
    if (const auto failed = current->enter("cudaHostRegister")) return failed;
    if (flags != device::register_read_only && is_read_only(memory)) return code::invalid_value;
    const std::lock_guard lock(current->mutex_);
    auto* begin = static_cast<std::byte*>(memory);
    for (const auto& [other, size] : current->registrations_)
      if (begin < other + size && other < begin + bytes) return 712;  // cudaErrorHostMemoryAlreadyRegistered
    current->registrations_[begin] = bytes;
    return code::success;
  }

  /// Whether the mapping of the memory's first page is.
  static bool is_read_only(void* memory) {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    auto* begin = static_cast<std::byte*>(memory) - reinterpret_cast<std::uintptr_t>(memory) % page;
    return madvise(begin, page, MADV_POPULATE_WRITE) != 0 && errno == EINVAL;
  }

  static Code host_unregister(void* memory) {
    if (const auto failed = current->enter("cudaHostUnregister")) return failed;
    FakeCuda::Lock lock(current->mutex_);
    const auto found = current->registrations_.find(static_cast<std::byte*>(memory));
    if (found == current->registrations_.end()) return code::invalid_value;
    if (current->is_copied(found->first, found->second)) ++current->early_unregistrations_;
    if (current->drain(lock, [] { return current->idle(device_of_thread); }))
      current->registrations_.erase(found);
    return code::success;
  }

  static Code host_allocate(void** memory, std::size_t bytes, unsigned) {
    if (const auto failed = current->enter("cudaHostAlloc")) return failed;
    constexpr std::size_t page = 4096;
    const auto pages = (bytes + page - 1) / page * page;
    // Not of malloc(): a device that is given up keeps it until the process ends, and that is no leak.
    *memory = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const std::lock_guard lock(current->mutex_);
    current->registrations_[static_cast<std::byte*>(*memory)] = pages;
    return code::success;
  }

  static Code host_free(void* memory) {
    if (memory == nullptr) return code::success;
    std::size_t bytes = 0;
    {
      const std::lock_guard lock(current->mutex_);
      const auto found = current->registrations_.find(static_cast<std::byte*>(memory));
      if (found != current->registrations_.end()) bytes = found->second;
    }
    if (const auto code = host_unregister(memory)) return code;
    munmap(memory, bytes);
    return code::success;
  }

  static Code allocate(void** memory, std::size_t bytes) {
    if (const auto failed = current->enter("cudaMalloc")) return failed;
    if (bytes > device_bytes) return code::out_of_memory;
    const std::lock_guard lock(current->mutex_);
    std::vector<std::byte> block(std::max<std::size_t>(bytes, 1), uninitialized);
    *memory = block.data();
    current->devices_[block.data()] = device_of_thread;
    current->allocations_.emplace(block.data(), std::move(block));
    return code::success;
  }

  static Code free(void* memory) {
    const auto failed = current->enter("cudaFree");
    // A broken device frees nothing; the end of the process does.
    return failed != code::success ? failed : current->release(memory);
  }

  static Code last_error() { return code::success; }
  static const char* error_name(Code code) {
    switch (code) {
      case code::out_of_memory:
        return "cudaErrorMemoryAllocation";
      case code::illegal_address:
        return "cudaErrorIllegalAddress";
      case 710:
        return "cudaErrorAssert";
      default:
        return "cudaErrorOfTheFake";
    }
  }
  static const char* error_text(Code code) {
    return code == code::out_of_memory ? "out of memory" : "an error of the fake";
  }
};

FakeCuda::FakeCuda(Execution execution, std::uint64_t seed) : execution_(execution), random_(seed) {
  if (current != nullptr) throw std::logic_error("there is a FakeCuda already");
  current = this;
}

FakeCuda::~FakeCuda() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  for (auto& stream : streams_)
    if (stream->thread.joinable()) stream->thread.join();
  current = nullptr;
}

FakeCuda& FakeCuda::of_process() { return *current; }

device::Runtime FakeCuda::runtime() {
  return {.set_device = FakeFunctions::set_device,
          .pci_bus_id = FakeFunctions::pci_bus_id,
          .stream_create = FakeFunctions::stream_create,
          .stream_destroy = FakeFunctions::stream_destroy,
          .stream_wait_event = FakeFunctions::stream_wait_event,
          .event_create = FakeFunctions::event_create,
          .event_destroy = FakeFunctions::event_destroy,
          .event_record = FakeFunctions::event_record,
          .event_record_with_flags = FakeFunctions::event_record_with_flags,
          .event_query = FakeFunctions::event_query,
          .copy = FakeFunctions::copy,
          .fill = FakeFunctions::fill,
          .host_register = FakeFunctions::host_register,
          .host_unregister = FakeFunctions::host_unregister,
          .host_allocate = FakeFunctions::host_allocate,
          .host_free = FakeFunctions::host_free,
          .allocate = FakeFunctions::allocate,
          .free = FakeFunctions::free,
          .last_error = FakeFunctions::last_error,
          .error_name = FakeFunctions::error_name,
          .error_text = FakeFunctions::error_text};
}

/// Counts the call. Returns the error that it is to report.
Code FakeCuda::enter(const char* function) {
  const std::lock_guard lock(mutex_);
  const auto failed = count(function);
  return broken_ != code::success ? broken_ : failed;
}

FakeCuda::StreamState& FakeCuda::state_of(device::StreamHandle stream) {
  return *reinterpret_cast<StreamState*>(stream);
}
FakeCuda::EventState& FakeCuda::state_of(device::EventHandle event) {
  return *reinterpret_cast<EventState*>(event);
}

void FakeCuda::launch(device::StreamHandle stream, std::function<void()> kernel) {
  const std::lock_guard lock(mutex_);
  compute(state_of(stream), std::move(kernel));
}

Code FakeCuda::compute(StreamState& stream, std::function<void()> kernel) {
  if (stream.graph != nullptr) {
    stream.graph->nodes.push_back({.kernel = std::move(kernel), .event = nullptr});
  } else {
    queue(stream, {.work = std::move(kernel), .records = nullptr, .waits_for = nullptr});
  }
  return code::success;
}

void FakeCuda::record(StreamState& stream, EventState& event) {
  event.last = std::make_shared<Recording>();
  queue(stream, {.work = nullptr, .records = event.last, .waits_for = nullptr});
}

void FakeCuda::begin_graph(device::StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  state_of(stream).graph = std::make_shared<Graph>();
}

std::shared_ptr<FakeCuda::Graph> FakeCuda::end_graph(device::StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  return std::exchange(state_of(stream).graph, nullptr);
}

std::size_t FakeCuda::graph_size(device::StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  return state_of(stream).graph->nodes.size();
}

void FakeCuda::launch(device::StreamHandle stream, const Graph& graph, std::size_t first, std::size_t last) {
  const std::lock_guard lock(mutex_);
  auto& state = state_of(stream);
  for (std::size_t i = first; i < last; ++i) {
    const auto& node = graph.nodes.at(i);
    if (node.event != nullptr) {
      record(state, *node.event);
    } else {
      queue(state, {.work = node.kernel, .records = nullptr, .waits_for = nullptr});
    }
  }
}

void FakeCuda::launch(device::StreamHandle stream, const Graph& graph) {
  launch(stream, graph, 0, graph.nodes.size());
}

void FakeCuda::catch_up(int stream) {
  Lock lock(mutex_);
  auto& state = *streams_.at(static_cast<std::size_t>(stream));
  while (!hangs_ && (state.busy || !state.queue.empty())) {
    if (execution_ == Execution::threads) {
      changed_.wait(lock);
    } else if (may_begin(state) && execute_front(state, lock)) {
      continue;  // Other streams go on no further than this one needs.
    } else if (!step(lock) && !hangs_) {
      throw std::logic_error("streams of the fake wait for each other");
    }
  }
}

void FakeCuda::launch_polled(device::StreamHandle stream, std::function<Progress()> kernel) {
  const std::lock_guard lock(mutex_);
  queue(state_of(stream),
        {.work = nullptr, .records = nullptr, .waits_for = nullptr, .polled = std::move(kernel)});
}

bool FakeCuda::is_device_memory(const void* memory, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  return is_of_device(memory, bytes);
}

void FakeCuda::queue(StreamState& stream, Operation operation) {
  stream.queue.push_back(std::move(operation));
  changed_.notify_all();
}

bool FakeCuda::may_begin(const StreamState& stream) {
  if (stream.queue.empty() || stream.busy) return false;
  const auto& awaited = stream.queue.front().waits_for;
  return awaited == nullptr || awaited->happened;
}

/// Does some work of the stream without the lock.
void FakeCuda::execute(StreamState& stream, const std::function<void()>& work, Lock& lock) {
  stream.busy = true;
  lock.unlock();
  work();
  lock.lock();
  stream.busy = false;
}

/// Executes the first operation of the stream, or as much of it as it can. Returns false if that is nothing.
bool FakeCuda::execute_front(StreamState& stream, Lock& lock) {
  if (until_hang_ == 0 && !std::exchange(hangs_, true)) changed_.notify_all();
  if (until_break_ == 0) broken_ = break_code_;
  if (hangs_) return false;
  if (const auto& front = stream.queue.front(); front.polled && broken_ == code::success) {
    auto progress = Progress::none;
    execute(
        stream, [&] { progress = front.polled(); }, lock);
    if (progress != Progress::none) changed_.notify_all();
    if (progress != Progress::done) return progress == Progress::some;
  }
  until_hang_ = std::max(until_hang_ - 1, -1);
  until_break_ = std::max(until_break_ - 1, -1);
  const auto operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  stream.busy_with = operation.host;
  if (operation.work && broken_ == code::success) execute(stream, operation.work, lock);
  stream.busy_with = nullptr;
  if (operation.records) operation.records->happened = true;
  changed_.notify_all();
  return true;
}

/// Executes one operation of a random stream, mostly of that of the operation before: so one may be far ahead
/// of another. False if there is none.
bool FakeCuda::step(Lock& lock) {
  std::vector<StreamState*> ready;
  for (const auto& stream : streams_)
    if (may_begin(*stream)) ready.push_back(stream.get());
  while (!ready.empty() && !hangs_) {
    auto chosen = std::ranges::find(ready, stepped_);
    if (chosen == ready.end() || random_() % 4 == 0)
      chosen = ready.begin() + static_cast<std::ptrdiff_t>(random_() % ready.size());
    stepped_ = *chosen;
    // Another thread may have gone on with that stream while this one executed something.
    if (may_begin(**chosen) && execute_front(**chosen, lock)) return true;
    ready.erase(chosen);
  }
  return false;
}

/// A GPU copies to its memory in the order in which it was asked to, whatever the streams are. The stream
/// that has to go on before `stream` copies, or `stream` itself.
FakeCuda::StreamState& FakeCuda::next_upload(StreamState& stream) {
  auto* next = &stream;
  auto first = stream.queue.front().upload;
  if (first == 0) return stream;
  for (const auto& other : streams_) {
    if (other->device != stream.device || other->busy) continue;
    for (const auto& operation : other->queue) {
      if (operation.waits_for != nullptr && !operation.waits_for->happened) break;
      if (operation.upload == 0 && (operation.work || operation.polled)) break;
      if (operation.upload == 0) continue;
      if (operation.upload < first) next = other.get(), first = operation.upload;
      break;
    }
  }
  return *next;
}

/// Executes one operation that has to come before the recording, or the recording itself.
bool FakeCuda::step_towards(const Recording& wanted, Lock& lock) {
  for (const auto& stream : streams_) {
    const auto records = [&](const Operation& queued) { return queued.records.get() == &wanted; };
    if (std::ranges::none_of(stream->queue, records)) continue;
    const auto awaited = stream->queue.front().waits_for;
    if (awaited != nullptr && !awaited->happened) return step_towards(*awaited, lock);
    return execute_front(next_upload(*stream), lock);
  }
  return false;
}

/// The thread of a stream.
void FakeCuda::work_off(StreamState& stream) {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ending_ || (!hangs_ && may_begin(stream)); });
    if (ending_) return;
    const auto dawdle = random_() % longest_dawdle;
    lock.unlock();
    // Where other processes want the processors, one yield takes milliseconds.
    const auto until_ns = base::now_ns() + longest_dawdle_ns;
    for (std::uint64_t i = 0; i < dawdle && base::now_ns() < until_ns; ++i) sched_yield();
    lock.lock();
    if (!execute_front(stream, lock)) changed_.wait_for(lock, poll_interval);
  }
}

bool FakeCuda::idle(int device) const {
  return std::ranges::all_of(streams_, [&](const auto& stream) {
    return stream->device != device || (stream->queue.empty() && !stream->busy);
  });
}

/// Waits until `done`. Returns false, and counts it, if that would take for ever.
bool FakeCuda::drain(Lock& lock, const std::function<bool()>& done) {
  while (!done()) {
    if (hangs_) {
      ++endless_waits_;
      return false;
    }
    if (execution_ == Execution::threads) {
      changed_.wait(lock);
    } else if (!step(lock) && !hangs_) {
      throw std::logic_error("streams of the fake wait for each other");
    }
  }
  return true;
}

bool FakeCuda::is_registered(const void* memory, std::size_t bytes) const {
  return within(registrations_, memory, bytes);
}

/// Whether a copy from or to that memory is queued or executed.
bool FakeCuda::is_copied(const std::byte* memory, std::size_t bytes) const {
  const auto touches = [&](const std::byte* host) {
    return host != nullptr && host >= memory && host < memory + bytes;
  };
  return std::ranges::any_of(streams_, [&](const auto& stream) {
    return touches(stream->busy_with) ||
           std::ranges::any_of(stream->queue, [&](const auto& queued) { return touches(queued.host); });
  });
}

bool FakeCuda::is_of_device(const void* memory, std::size_t bytes) const {
  if (any_memory_) return true;
  std::vector<std::pair<const std::byte*, std::size_t>> ranges;
  for (const auto& [begin, block] : allocations_) ranges.emplace_back(begin, block.size());
  return within(ranges, memory, bytes);
}

Code FakeCuda::copy(std::byte* to, const std::byte* from, std::size_t bytes, device::Direction direction,
                    device::StreamHandle stream) {
  Lock lock(mutex_);
  const bool up = direction == device::Direction::to_device;
  copied_[direction] += bytes;
  if (!is_of_device(up ? to : from, bytes)) return code::invalid_value;
  if (direction == device::Direction::on_device) {
    if (!is_of_device(to, bytes)) return code::invalid_value;
    return compute(state_of(stream), [=] { std::memcpy(to, from, bytes); });
  }
  if (state_of(stream).graph != nullptr) return recording_refuses;
  const bool registered = is_registered(up ? from : to, bytes);
  // "Memory regions requested must be either entirely registered with CUDA, or [..] not registered at all."
  if (!registered && touches(registrations_, up ? from : to, bytes)) return code::invalid_value;
  auto done = std::make_shared<Recording>();
  queue(state_of(stream), {.work = [=] { std::memcpy(to, from, bytes); },
                           .records = done,
                           .waits_for = nullptr,
                           .host = up ? from : to,
                           .upload = up ? ++uploads_ : 0});
  if (registered) return code::success;
  ++unregistered_copies_;
  drain(lock, [&] { return done->happened; });
  return code::success;
}

Code FakeCuda::fill(std::byte* memory, int byte, std::size_t bytes, device::StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  if (!is_of_device(memory, bytes)) return code::invalid_value;
  return compute(state_of(stream), [=] { std::memset(memory, byte, bytes); });
}

Code FakeCuda::query(device::EventHandle event) {
  Lock lock(mutex_);
  const auto& state = state_of(event);
  const Wait wait{host, state.number};
  waits_.insert(wait);
  const auto recording = state.last;
  if (recording == nullptr || left_out_.contains(wait)) return code::success;
  if (!recording->happened && execution_ == Execution::stepped) step(lock);
  if (!recording->happened && execution_ == Execution::lazy) step_towards(*recording, lock);
  if (broken_ != code::success) return broken_;
  return recording->happened ? code::success : code::not_ready;
}

Code FakeCuda::release(void* memory) {
  Lock lock(mutex_);
  auto* block = static_cast<std::byte*>(memory);
  const auto device = devices_.find(block);
  if (device == devices_.end()) return code::invalid_value;
  if (!drain(lock, [&] { return idle(device->second); })) return code::success;
  devices_.erase(device);
  return allocations_.erase(block) == 1 ? code::success : code::invalid_value;
}

void FakeCuda::break_now(Code code) {
  const std::lock_guard lock(mutex_);
  broken_ = code;
  changed_.notify_all();
}

void FakeCuda::go_on() {
  const std::lock_guard lock(mutex_);
  until_hang_ = -1;
  hangs_ = false;
  changed_.notify_all();
}

bool FakeCuda::has_settled() {
  const std::lock_guard lock(mutex_);
  return std::ranges::all_of(streams_,
                             [](const auto& stream) { return stream->queue.empty() && !stream->busy; });
}

}  // namespace accelmgr::test
