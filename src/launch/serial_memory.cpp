#include "launch/serial_memory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/interruption.hpp"
#include "base/unique_fd.hpp"
#include "ipc/memory.hpp"
#include "launch/variables.hpp"

namespace accelmgr::launch {

struct SerialPlace {
  pthread_mutex_t mutex;      ///< Robust.
  std::atomic<pid_t> holder;  ///< Whoever is inside; 0: none. What a dead one left the next overwrites.
  std::atomic<std::uint32_t> named;  ///< 1: `name` is there, for good. Whoever holds Places::naming.
  char name[max_serial_name_bytes + 1];
};

namespace {

// All processes are the same build, or of one installation: the magic number says so.
constexpr std::uint64_t magic = 0x6163'636c'7372'0001;
constexpr double naming_timeout_s = 10;
constexpr double turn_s = 0.1;  ///< How long an interruption may go unseen.

struct Places {
  std::uint64_t magic;
  pthread_mutex_t naming;
  SerialPlace places[serial_places];
};

void check(int error, const char* call) {
  if (error != 0) throw SystemError(call, error);
}

void make_mutex(pthread_mutex_t& mutex) {
  pthread_mutexattr_t attributes;
  check(pthread_mutexattr_init(&attributes), "pthread_mutexattr_init");
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ERRORCHECK);
  const int error = pthread_mutex_init(&mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  check(error, "pthread_mutex_init of a mutex that is shared by processes");
}

/// Of the executor of that name. False after the timeout.
bool lock(pthread_mutex_t& mutex, std::string_view name, double timeout_s) {
  const auto until_ns = base::Deadline::in_seconds(timeout_s).ns();
  const timespec until{.tv_sec = until_ns / 1'000'000'000, .tv_nsec = until_ns % 1'000'000'000};
  const int error = pthread_mutex_clocklock(&mutex, CLOCK_MONOTONIC, &until);
  if (error == ETIMEDOUT) return false;
  if (error == EDEADLK)
    throw UsageError(fmt::format("serial executor '{}': this thread is inside already", name));
  if (error == EOWNERDEAD)
    check(pthread_mutex_consistent(&mutex), "pthread_mutex_consistent");
  else
    check(error, "pthread_mutex_clocklock");
  return true;
}

/// Made once, and there until the process ends: executors of other threads may be inside.
struct Memory {
  std::string path;   ///< Of one that was found.
  base::UniqueFd fd;  ///< Of our own.
  ipc::Mapping mapping;
  Memory* next = nullptr;
  Places& places() const noexcept { return *reinterpret_cast<Places*>(mapping.data()); }
};

// No locks: a fork in another thread would copy them. A forked process shares both with its parent.
std::atomic<Memory*> own{nullptr};
std::atomic<Memory*> found{nullptr};  ///< The last one first.

std::unique_ptr<Memory> make_memory() {
  auto memory = std::make_unique<Memory>();
  memory->fd = ipc::create_memfd("accelmgr serial", sizeof(Places));
  memory->mapping = ipc::Mapping(memory->fd.get(), 0, sizeof(Places), ipc::Access::read_write);
  auto& places = memory->places();
  make_mutex(places.naming);
  for (auto& place : places.places) make_mutex(place.mutex);
  places.magic = magic;
  return memory;
}

std::unique_ptr<Memory> open_memory(const std::string& path) {
  auto memory = std::make_unique<Memory>();
  memory->path = path;
  const base::UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) throw SystemError(fmt::format("opening {} of {}", path, variable::serial_memory), errno);
  struct stat status {};
  if (fstat(fd.get(), &status) == 0 && status.st_size == static_cast<off_t>(sizeof(Places)))
    memory->mapping = ipc::Mapping(fd.get(), 0, sizeof(Places), ipc::Access::read_write);
  if (!memory->mapping || memory->places().magic != magic)
    throw SessionError(fmt::format("{} ({}) is not the memory of serial executors of this build",
                                   variable::serial_memory, path));
  return memory;
}

Memory& own_memory() {
  auto* there = own.load();
  if (there != nullptr) return *there;
  auto made = make_memory();
  if (own.compare_exchange_strong(there, made.get())) return *made.release();
  return *there;
}

Memory& found_memory(const std::string& path) {
  auto* first = found.load();
  for (auto* memory = first; memory != nullptr; memory = memory->next)
    if (memory->path == path) return *memory;
  auto opened = open_memory(path);
  do opened->next = first;
  while (!found.compare_exchange_weak(first, opened.get()));
  return *opened.release();
}

std::string path_from_environment() {
  const char* path = std::getenv(variable::serial_memory);
  return path != nullptr ? path : "";
}

SerialPlace* find(Places& places, std::string_view name) noexcept {
  for (auto& place : places.places)
    if (place.named.load(std::memory_order_acquire) != 0 && name == place.name) return &place;
  return nullptr;
}

SerialPlace& name_place(Places& places, std::string_view name) {
  if (!lock(places.naming, name, naming_timeout_s))
    throw SessionError(fmt::format(
        "the serial executor '{}' could not be named: another process has been naming one for {} s", name,
        naming_timeout_s));
  auto* place = find(places, name);
  if (place == nullptr) {
    place = std::find_if(std::begin(places.places), std::end(places.places),
                         [](const SerialPlace& free) { return free.named.load() == 0; });
    if (place != std::end(places.places)) {
      std::memset(place->name, 0, sizeof place->name);
      name.copy(place->name, max_serial_name_bytes);
      place->named.store(1, std::memory_order_release);
    }
  }
  pthread_mutex_unlock(&places.naming);
  if (place == std::end(places.places))
    throw ConfigError(fmt::format("serial executor '{}': there are {} others already, and no more places",
                                  name, serial_places));
  return *place;
}

}  // namespace

std::string serial_memory_path() {
  auto path = path_from_environment();
  return path.empty() ? fmt::format("/proc/{}/fd/{}", getpid(), own_memory().fd.get()) : path;
}

SerialPlace& serial_place(std::string_view name) {
  const auto path = path_from_environment();
  auto& places = (path.empty() ? own_memory() : found_memory(path)).places();
  auto* place = find(places, name);
  return place != nullptr ? *place : name_place(places, name);
}

bool enter(SerialPlace& place, double timeout_s) {
  const auto deadline = base::Deadline::in_seconds(timeout_s);
  do {
    const double left_s = static_cast<double>(deadline.remaining_ns()) / 1e9;
    if (!lock(place.mutex, place.name, std::clamp(left_s, 0.0, turn_s))) continue;
    place.holder.store(getpid());
    return true;
  } while (!deadline.passed() && !base::interrupted());
  return false;
}

void leave(SerialPlace& place) noexcept {
  place.holder.store(0);
  pthread_mutex_unlock(&place.mutex);
}

pid_t holder(const SerialPlace& place) noexcept { return place.holder.load(); }

}  // namespace accelmgr::launch
