#include "base/cuda/device_collectives.hpp"

#include <fmt/format.h>

#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "accelmgr/errors.hpp"

namespace accelmgr::device {
namespace {

std::optional<NcclType> find_type(DType dtype) noexcept {
  using enum NcclType;
  // In the order of DType. NCCL has none of the later types.
  constexpr std::optional<NcclType> types[]{uint8,  int8,  std::nullopt, std::nullopt, uint32,  int32,
                                            uint64, int64, float16,      bfloat16,     float32, float64};
  const auto place = static_cast<std::size_t>(dtype);
  return place < std::size(types) ? types[place] : std::nullopt;
}

std::optional<NcclOperation> find_operation(ReduceOp operation) noexcept {
  using enum NcclOperation;
  constexpr NcclOperation operations[]{sum, mean, product, minimum, maximum};  // In the order of ReduceOp.
  const auto place = static_cast<std::size_t>(operation);
  return place < std::size(operations) ? std::optional(operations[place]) : std::nullopt;
}

NcclType type_of(DType dtype) {
  if (const auto type = find_type(dtype)) return *type;
  throw UsageError(fmt::format("{} cannot be reduced on devices: NCCL has no such type", name_of(dtype)));
}

NcclOperation operation_of(ReduceOp operation, DType dtype) {
  check_reduction(dtype, operation);
  if (const auto found = find_operation(operation)) return *found;
  throw UsageError(fmt::format("NCCL has no {}: it reduces nothing bitwise", name_of(operation)));
}

std::string text_of(const Nccl& nccl, const char* function, NcclCode code, CommunicatorHandle communicator) {
  const auto* last = nccl.last_error(communicator);
  return fmt::format("{}: {} ({}){}{}", function, nccl.error_text(code), code,
                     last != nullptr && *last != '\0' ? ": " : "", last != nullptr ? last : "");
}

/// Makes the call in a thread. Returns false, and leaves the thread, if it has not returned at the deadline.
/// NCCL's abort and destroy wait for NCCL's threads, which wait for the device.
bool returns(std::function<void()> call, base::Deadline deadline) noexcept {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  try {
    const auto shared = std::make_shared<Shared>();
    std::thread thread([shared, call = std::move(call)] {
      call();
      const std::lock_guard lock(shared->mutex);
      shared->done = true;
      shared->changed.notify_all();
    });
    bool done = false;
    {
      std::unique_lock lock(shared->mutex);
      done = shared->changed.wait_for(lock, std::chrono::nanoseconds(deadline.remaining_ns()),
                                      [&] { return shared->done; });
    }
    done ? thread.join() : thread.detach();
    return done;
  } catch (const std::exception&) {
    return false;  // There is no thread. The end of the process gives back what the call would have.
  }
}

}  // namespace

NcclId DeviceCollectives::make_id(const Nccl& nccl) {
  NcclId id{};
  if (const auto code = nccl.get_unique_id(&id); code != nccl_code::success)
    throw DeviceError(text_of(nccl, "ncclGetUniqueId", code, nullptr), "ncclGetUniqueId", code);
  return id;
}

bool DeviceCollectives::reduces(DType dtype, ReduceOp operation) noexcept {
  return find_type(dtype) && find_operation(operation);
}

DeviceCollectives::DeviceCollectives(Device& device, const Nccl& nccl, const NcclId& id, int rank, int size,
                                     base::Waiter& waiter, double timeout_s)
    : device_(device), nccl_(nccl), rank_(rank), size_(size), waiter_(waiter), timeout_s_(timeout_s) {
  if (rank < 0 || rank >= size)
    throw UsageError(fmt::format("a team of {} devices has no rank {}", size, rank));
  NcclConfig config{.blocking = 0};
  const auto code = nccl_.init_rank(&communicator_, size, id, rank, &config);
  if (code == nccl_code::success || code == nccl_code::in_progress) return;
  const auto text = text_of(nccl_, "ncclCommInitRankConfig", code, communicator_);
  abort();
  throw DeviceError(text, "ncclCommInitRankConfig", code);
}

DeviceCollectives::~DeviceCollectives() {
  if (device_.given_up()) return;  // A hanging device is called no more.
  if (connected_ && !aborted()) {
    leave();
  } else {
    abort();
  }
}

// Throws if the communicator was aborted, by this thread or by another one.
NcclCode DeviceCollectives::call(const char* function, const Call& call) {
  CommunicatorHandle communicator = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (aborted())
      throw DeviceError(fmt::format("{}: the communicator of the team was aborted", function), function,
                        nccl_code::invalid_usage);
    communicator = communicator_;
    busy_ = true;
  }
  const auto code = call(communicator);
  {
    const std::lock_guard lock(mutex_);
    busy_ = false;
  }
  idle_.notify_all();
  return code;
}

/// Returns in_progress while the last call is under way. Throws on every error.
NcclCode DeviceCollectives::state(const char* function) {
  auto state = nccl_code::success;
  check("ncclCommGetAsyncError", call(function, [&](CommunicatorHandle communicator) {
          return nccl_.async_error(communicator, &state);
        }));
  if (state != nccl_code::in_progress) check(function, state);
  return state;
}

void DeviceCollectives::check(const char* function, NcclCode code) {
  if (code != nccl_code::success) fail(function, code);
}

void DeviceCollectives::fail(const char* function, NcclCode code) {
  std::string text;
  call(function, [&](CommunicatorHandle communicator) {
    text = text_of(nccl_, function, code, communicator);
    return nccl_code::success;
  });
  abort();
  const auto wanted = [&] { return waiter_.wanted(); };
  if (code == nccl_code::remote_error &&
      poll_until([] { return false; }, wanted, timeout_s_) == Waited::unwanted)
    throw Unwanted();
  if (code != nccl_code::unhandled_cuda_error) failure_ = text;
  throw DeviceError(text, function, code);
}

/// Aborts unless the wait is done.
bool DeviceCollectives::ended(const char* function, Waited waited, double timeout_s) {
  if (waited == Waited::done) return true;
  abort();
  if (waited == Waited::unwanted) return false;
  failure_ = fmt::format(
      "{}: the team of {} devices hangs: not all ranks have done their part within {} s; this is rank {}",
      function, size_, timeout_s, rank_);
  throw DeviceError(failure_, function, nccl_code::in_progress);
}

/// Waits until `ready` returns true, which looks for errors. Returns false if the result is not wanted.
template <class Ready>
bool DeviceCollectives::poll(const char* function, Ready&& ready, double timeout_s) {
  try {
    const auto waited = poll_until(
        ready, [&] { return waiter_.wanted(); }, timeout_s);
    return ended(function, waited, timeout_s);
  } catch (const Unwanted&) {
    return false;
  }
}

/// Makes a call, and waits until its operation is on its stream.
bool DeviceCollectives::queue(const char* function, const Call& operation) {
  if (!connected_ && !aborted()) throw UsageError(fmt::format("{}: the team is not connected", function));
  bool called = false;
  const auto queued = [&] {
    if (!std::exchange(called, true))
      if (const auto code = call(function, operation); code != nccl_code::in_progress) check(function, code);
    return state(function) != nccl_code::in_progress;
  };
  return poll(function, queued, timeout_s_);
}

bool DeviceCollectives::connect(double timeout_s) {
  constexpr const char* function = "ncclCommInitRankConfig";
  const auto come = [&] { return state(function) != nccl_code::in_progress; };
  connected_ = poll(function, come, timeout_s);
  return connected_;
}

bool DeviceCollectives::all_reduce(const std::byte* from, std::byte* to, std::size_t count, DType dtype,
                                   ReduceOp operation, StreamHandle stream) {
  return queue("ncclAllReduce",
               [&, type = type_of(dtype), op = operation_of(operation, dtype)](auto* communicator) {
                 return nccl_.all_reduce(from, to, count, type, op, communicator, stream);
               });
}

bool DeviceCollectives::reduce_scatter(const std::byte* from, std::byte* to, std::size_t count, DType dtype,
                                       ReduceOp operation, StreamHandle stream) {
  return queue("ncclReduceScatter",
               [&, type = type_of(dtype), op = operation_of(operation, dtype)](auto* communicator) {
                 return nccl_.reduce_scatter(from, to, count, type, op, communicator, stream);
               });
}

bool DeviceCollectives::all_gather(const std::byte* from, std::byte* to, std::size_t bytes,
                                   StreamHandle stream) {
  return queue("ncclAllGather", [&](auto* communicator) {
    return nccl_.all_gather(from, to, bytes, NcclType::uint8, communicator, stream);
  });
}

bool DeviceCollectives::broadcast(std::byte* memory, std::size_t bytes, int root, StreamHandle stream) {
  return queue("ncclBroadcast", [&](auto* communicator) {
    return nccl_.broadcast(memory, memory, bytes, NcclType::uint8, root, communicator, stream);
  });
}

// A group that was begun is ended, whatever happens in it: the next call would be part of it.
bool DeviceCollectives::all_to_all(const std::byte* from, std::byte* to, std::size_t bytes,
                                   StreamHandle stream) {
  return queue("ncclGroupEnd", [&](auto* communicator) {
    if (const auto failed = nccl_.group_start(); failed != nccl_code::success) return failed;
    auto first = nccl_code::success;
    const auto note = [&](NcclCode code) {
      if (first == nccl_code::success && code != nccl_code::in_progress) first = code;
    };
    for (int peer = 0; peer < size_; ++peer) {
      const auto at = static_cast<std::size_t>(peer) * bytes;
      note(nccl_.send(from + at, bytes, NcclType::uint8, peer, communicator, stream));
      note(nccl_.receive(to + at, bytes, NcclType::uint8, peer, communicator, stream));
    }
    const auto end = nccl_.group_end();
    return first != nccl_code::success ? first : end;
  });
}

bool DeviceCollectives::wait(const Event& event) {
  constexpr const char* function = "ncclCommGetAsyncError";
  auto looked = base::now_ns();
  const auto done = [&] {
    const bool happened = device_.happened(event);
    // The operations before the event may have ended by an abort.
    if (!happened && base::now_ns() - looked < timing::look_ns) return false;
    looked = base::now_ns();
    state(function);
    return happened;
  };
  return poll(function, done, timeout_s_);
}

/// Takes the communicator, so that no function of NCCL is called with it any more. Null if there is none, or
/// if a function that was called with it has not returned at the deadline.
CommunicatorHandle DeviceCollectives::take(base::Deadline deadline) noexcept {
  aborted_ = true;
  std::unique_lock lock(mutex_);
  const bool idle =
      idle_.wait_for(lock, std::chrono::nanoseconds(deadline.remaining_ns()), [&] { return !busy_; });
  if (!idle) never_ends("a call of NCCL");
  return idle ? std::exchange(communicator_, nullptr) : nullptr;
}

void DeviceCollectives::abort() noexcept {
  const auto deadline = base::Deadline::in_seconds(timing::team_aborts_s);
  auto* communicator = take(deadline);
  if (communicator == nullptr) return;
  if (!returns([abort = nccl_.abort, communicator] { abort(communicator); }, deadline))
    never_ends("ncclCommAbort");
}

void DeviceCollectives::never_ends(const char* what) noexcept {
  waiter_.never_ends(
      fmt::format("{} has not returned within {} s: NCCL may go on to write to memory of this process", what,
                  timing::team_aborts_s));
}

void DeviceCollectives::leave() noexcept {
  auto state = nccl_code::success;
  try {
    const auto finalized = call("ncclCommFinalize", nccl_.finalize);
    const auto ended = [&] {
      call("ncclCommGetAsyncError",
           [&](auto* communicator) { return nccl_.async_error(communicator, &state); });
      return state != nccl_code::in_progress;
    };
    const bool done = (finalized == nccl_code::success || finalized == nccl_code::in_progress) &&
                      poll_until(
                          ended, [] { return true; }, timing::device_settles_s) == Waited::done;
    if (!done || state != nccl_code::success) return abort();
  } catch (const std::exception&) {
    return;  // Another thread has aborted it.
  }
  const auto deadline = base::Deadline::in_seconds(timing::device_settles_s);
  if (auto* communicator = take(deadline); communicator != nullptr)
    returns([destroy = nccl_.destroy, communicator] { destroy(communicator); }, deadline);
}

}  // namespace accelmgr::device
