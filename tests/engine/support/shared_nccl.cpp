#include "engine/support/shared_nccl.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/support/fake_cuda.hpp"
#include "half_precision.hpp"

namespace accelmgr::test {
namespace {

using device::CommunicatorHandle;
using device::NcclCode;
using device::NcclOperation;
using device::NcclType;
using device::StreamHandle;
namespace nccl_code = device::nccl_code;

constexpr std::size_t most_members = 24;
constexpr std::size_t slot_bytes = std::size_t{64} << 20;  // Sparse. Larger than a bucket with its padding.
constexpr std::byte left_value{0xff};

enum class Collective : std::uint32_t { reduce_scatter, all_gather };

/// What all ranks of an operation must agree on.
struct Signature {
  Collective kind;
  NcclType type;
  std::uint64_t count;
  bool operator==(const Signature&) const = default;
};

/// In shared memory; zeros are its beginning. Written by that member.
struct Member {
  alignas(64) std::atomic<std::uint32_t> has_come;
  std::atomic<std::uint64_t> published;  ///< So many operations; the last one is in the slot.
  std::atomic<std::uint64_t> read;       ///< So many operations of the others.
  Signature signature;
};

struct Shared {
  Member members[most_members];
};

constexpr std::size_t header_bytes = (sizeof(Shared) + 4095) / 4096 * 4096;

/// What an id says: where the memory is.
struct Place {
  pid_t pid;
  int fd;
};

struct Communicator {
  Communicator(void* memory, int size, int rank)
      : shared(static_cast<Shared*>(memory)),
        size(static_cast<std::size_t>(size)),
        rank(static_cast<std::size_t>(rank)) {}
  ~Communicator() { munmap(shared, header_bytes + size * slot_bytes); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  std::byte* slot(std::size_t member) const {
    return reinterpret_cast<std::byte*>(shared) + header_bytes + member * slot_bytes;
  }
  Member& own() const { return shared->members[rank]; }
  template <class Done>
  bool all(Done&& done) const {
    return std::all_of(shared->members, shared->members + size, done);
  }
  /// Returns false if this rank aborts first.
  template <class Done>
  bool wait(Done&& done) const {
    while (!done()) {
      if (aborted.load()) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return !aborted.load();
  }

  Shared* shared;
  std::size_t size, rank;
  std::uint64_t issued = 0;  ///< Operations. Kernels are executed in their order, whatever their streams.
  std::atomic<std::uint64_t> executed = 0;
  std::atomic<int> running = 0;
  std::atomic<bool> aborted = false;
};

/// Handles are addresses of these. They are never freed: kernels may still come to them.
std::mutex mutex;
std::vector<std::shared_ptr<Communicator>> communicators;
std::atomic<int> sums = 0;

Communicator& team_at(CommunicatorHandle handle) { return *reinterpret_cast<Communicator*>(handle); }

std::size_t element_bytes(NcclType type) {
  switch (type) {
    case NcclType::uint8:
      return 1;
    case NcclType::float16:
    case NcclType::bfloat16:
      return 2;
    case NcclType::float64:
      return 8;
    default:
      return 4;
  }
}

float sum_of(float one, float other) { return one + other; }
double sum_of(double one, double other) { return one + other; }
/// Rounds after each rank, as NCCL may.
template <class Half>
Half sum_of(Half one, Half other) {
  return to_half<Half>(from_half(one) + from_half(other));
}

template <class T>
void add(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += sizeof(T)) {
    T sum, value;
    std::memcpy(&sum, to + at, sizeof sum);
    std::memcpy(&value, from + at, sizeof value);
    sum = sum_of(sum, value);
    std::memcpy(to + at, &sum, sizeof sum);
  }
}

/// One rank's part of operation `number`. Returns false if this rank aborts first.
bool execute(Communicator& team, std::uint64_t number, const Signature& signature, const std::byte* from,
             std::byte* to) {
  const auto each = signature.count * element_bytes(signature.type);
  const bool gathers = signature.kind == Collective::all_gather;
  if (!team.wait([&] { return team.executed.load() == number; })) return false;
  if (!team.wait([&] { return team.all([&](const auto& other) { return other.read.load() >= number; }); }))
    return false;
  team.own().signature = signature;
  std::memcpy(team.slot(team.rank), from, gathers ? each : each * team.size);
  team.own().published.store(number + 1);
  if (!team.wait(
          [&] { return team.all([&](const auto& other) { return other.published.load() > number; }); }))
    return false;
  if (!team.all([&](const auto& other) { return other.signature == signature; })) {
    std::fprintf(stderr, "operation %llu of rank %zu is not that of the others\n",
                 static_cast<unsigned long long>(number), team.rank);
    std::abort();
  }
  for (std::size_t i = 0; i < team.size; ++i) {
    if (gathers) {
      std::memcpy(to + i * each, team.slot(i), each);
      continue;
    }
    // NCCL promises no order.
    const auto* part = team.slot((i + number) % team.size) + team.rank * each;
    if (i == 0)
      std::memcpy(to, part, each);
    else if (signature.type == NcclType::float64)
      add<double>(to, part, each);
    else if (signature.type == NcclType::bfloat16)
      add<BFloat16>(to, part, each);
    else if (signature.type == NcclType::float16)
      add<Float16>(to, part, each);
    else
      add<float>(to, part, each);
  }
  team.own().read.store(number + 1);
  team.executed.store(number + 1);
  return true;
}

NcclCode issue(CommunicatorHandle handle, const Signature& signature, const void* from, void* to,
               StreamHandle stream) {
  auto& team = team_at(handle);
  const auto written = signature.count * element_bytes(signature.type) *
                       (signature.kind == Collective::all_gather ? team.size : std::size_t{1});
  if (team.aborted.load() || written > slot_bytes) return nccl_code::invalid_argument;
  FakeCuda::of_process().launch(
      stream, [&team, signature, number = team.issued++, from = static_cast<const std::byte*>(from),
               to = static_cast<std::byte*>(to), written] {
        ++team.running;
        if (!execute(team, number, signature, from, to)) std::fill_n(to, written, left_value);
        --team.running;
      });
  return nccl_code::success;
}

struct Functions {
  static NcclCode get_version(int* version) {
    *version = 22809;
    return nccl_code::success;
  }

  // The descriptor stays open until the process ends.
  static NcclCode get_unique_id(device::NcclId* id) {
    const Place place{getpid(), memfd_create("fake nccl", MFD_CLOEXEC)};
    if (place.fd < 0 || ftruncate(place.fd, header_bytes + most_members * slot_bytes) != 0)
      return nccl_code::system_error;
    std::memset(id->bytes, 0, sizeof id->bytes);
    std::memcpy(id->bytes, &place, sizeof place);
    return nccl_code::success;
  }

  static NcclCode init_rank(CommunicatorHandle* handle, int size, device::NcclId id, int rank,
                            device::NcclConfig* config) {
    if (config->magic != 0xcafebeef || config->blocking != 0) return nccl_code::invalid_argument;
    Place place{};
    std::memcpy(&place, id.bytes, sizeof place);
    const auto path = "/proc/" + std::to_string(place.pid) + "/fd/" + std::to_string(place.fd);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return nccl_code::system_error;
    auto* memory = mmap(nullptr, header_bytes + static_cast<std::size_t>(size) * slot_bytes,
                        PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) return nccl_code::system_error;
    const std::lock_guard lock(mutex);
    auto& team = *communicators.emplace_back(std::make_shared<Communicator>(memory, size, rank));
    if (team.own().has_come.exchange(1) != 0) return nccl_code::invalid_usage;
    *handle = reinterpret_cast<CommunicatorHandle>(&team);
    return nccl_code::in_progress;
  }

  static NcclCode async_error(CommunicatorHandle handle, NcclCode* error) {
    const bool all = team_at(handle).all([](const auto& member) { return member.has_come.load() != 0; });
    *error = all ? nccl_code::success : nccl_code::in_progress;
    return nccl_code::success;
  }

  static NcclCode abort(CommunicatorHandle handle) {
    auto& team = team_at(handle);
    team.aborted.store(true);
    while (team.running.load() != 0) std::this_thread::yield();
    return nccl_code::success;
  }
  static NcclCode finalize(CommunicatorHandle) { return nccl_code::success; }

  static NcclCode reduce_scatter(const void* from, void* to, std::size_t count, NcclType type, NcclOperation,
                                 CommunicatorHandle handle, StreamHandle stream) {
    ++sums;
    return issue(handle, {Collective::reduce_scatter, type, count}, from, to, stream);
  }
  static NcclCode all_gather(const void* from, void* to, std::size_t count, NcclType type,
                             CommunicatorHandle handle, StreamHandle stream) {
    return issue(handle, {Collective::all_gather, type, count}, from, to, stream);
  }

  static NcclCode all_reduce(const void*, void*, std::size_t, NcclType, NcclOperation, CommunicatorHandle,
                             StreamHandle) {
    return nccl_code::invalid_usage;
  }
  static NcclCode broadcast(const void*, void*, std::size_t, NcclType, int, CommunicatorHandle,
                            StreamHandle) {
    return nccl_code::invalid_usage;
  }
  static NcclCode send(const void*, std::size_t, NcclType, int, CommunicatorHandle, StreamHandle) {
    return nccl_code::invalid_usage;
  }
  static NcclCode receive(void*, std::size_t, NcclType, int, CommunicatorHandle, StreamHandle) {
    return nccl_code::invalid_usage;
  }
  static NcclCode group() { return nccl_code::invalid_usage; }

  static const char* error_text(NcclCode) { return "an error of the fake"; }
  static const char* last_error(CommunicatorHandle) { return ""; }
};

}  // namespace

int shared_nccl_sums() { return sums.load(); }

device::Nccl shared_nccl() {
  return {.get_version = Functions::get_version,
          .get_unique_id = Functions::get_unique_id,
          .init_rank = Functions::init_rank,
          .async_error = Functions::async_error,
          .abort = Functions::abort,
          .finalize = Functions::finalize,
          .destroy = Functions::abort,
          .all_reduce = Functions::all_reduce,
          .reduce_scatter = Functions::reduce_scatter,
          .all_gather = Functions::all_gather,
          .broadcast = Functions::broadcast,
          .send = Functions::send,
          .receive = Functions::receive,
          .group_start = Functions::group,
          .group_end = Functions::group,
          .error_text = Functions::error_text,
          .last_error = Functions::last_error};
}

}  // namespace accelmgr::test
