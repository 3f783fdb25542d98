#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "accelmgr/launch.hpp"
#include "base/clock.hpp"
#include "base/fnv1a.hpp"
#include "base/interruption.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/proc_file.hpp"
#include "base/timing.hpp"
#include "base/unique_fd.hpp"
#include "launcher/launch/plan/variables.hpp"
#include "launcher/launch/serial/serial_memory.hpp"

namespace accelmgr::launch {
namespace {

// A name has one byte that can be locked: its hash is the offset, mostly beyond the end of the file. The lock
// is of an open file description, so the kernel releases it when the holder ends, and with it all processes
// that the holder has forked inside. The file itself has pids of holders, for errors: names share these by
// their hashes.
constexpr std::size_t pids = 8192;
constexpr std::size_t file_bytes = pids * sizeof(pid_t);

std::atomic<int> own_file{-1};  ///< Made by this process or by one from which it was forked.

int make_own_file() {
  int file = own_file.load();
  if (file >= 0) return file;
  auto made = ipc::create_memfd("accelmgr serial", file_bytes);
  return own_file.compare_exchange_strong(file, made.get()) ? made.release() : file;
}

std::string path_from_environment() {
  const char* path = std::getenv(variable::serial_memory);
  return path != nullptr ? path : "";
}

/// A new open file description: two threads, or a process and its fork, exclude each other too.
base::UniqueFd open_file() {
  auto path = path_from_environment();
  if (path.empty()) path = fmt::format("/proc/self/fd/{}", make_own_file());
  base::UniqueFd file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file) throw SystemError(fmt::format("opening {} of {}", path, variable::serial_memory), errno);
  struct stat status {};
  if (fstat(file.get(), &status) != 0 || status.st_size != static_cast<off_t>(file_bytes))
    throw SessionError(fmt::format("{} ({}) is not the memory of serial executors of this build",
                                   variable::serial_memory, path));
  return file;
}

constexpr std::int64_t first_pause_ns = 20'000;  ///< Doubles up to timing::look_ns.

off_t place_of(const std::string& name) {
  return static_cast<off_t>(base::fnv1a(name) % std::numeric_limits<off_t>::max());
}

bool set_lock(int file, const std::string& name, int type) {
  struct flock lock {};
  lock.l_type = static_cast<short>(type);
  lock.l_whence = SEEK_SET;
  lock.l_start = place_of(name);
  lock.l_len = 1;
  if (fcntl(file, F_OFD_SETLK, &lock) == 0) return true;
  if (errno != EAGAIN && errno != EACCES) throw SystemError("locking a serial executor", errno);
  return false;
}

off_t place_of_pid(const std::string& name) {
  return place_of(name) % static_cast<off_t>(pids) * static_cast<off_t>(sizeof(pid_t));
}

SessionError busy(int file, const std::string& name, double timeout_s) {
  pid_t pid = 0;
  const bool known = pread(file, &pid, sizeof pid, place_of_pid(name)) == sizeof pid && pid > 0;
  auto comm = known ? ipc::read_proc(fmt::format("/proc/{}/comm", pid)).value_or("") : "";
  comm.erase(comm.find_last_not_of('\n') + 1);
  return SessionError(
      fmt::format("the serial executor '{}' was not free within {} s: process {} ({}) is in its run()", name,
                  timeout_s, pid, comm.empty() ? "ended" : comm));
}

/// Orders what the threads of this process do inside; the lock orders processes.
std::atomic<std::uint64_t> turns{0};

using Inside = std::pair<pid_t, std::string>;
thread_local std::vector<Inside> inside;

}  // namespace

struct SerialExecutor::Place {
  std::string name;
  double timeout_s;
  base::UniqueFd file{};  ///< Used only by the thread that holds the lock.
};

std::string serial_memory_path() {
  auto path = path_from_environment();
  return path.empty() ? fmt::format("/proc/{}/fd/{}", getpid(), make_own_file()) : path;
}

SerialExecutor::SerialExecutor(std::string name, double timeout_s)
    : place_(std::make_unique<Place>(Place{std::move(name), timeout_s})) {
  if (place_->name.empty()) throw UsageError("the name of a serial executor must not be empty");
  open_file();  // Now, so that forked processes inherit it.
}

SerialExecutor::~SerialExecutor() = default;

void SerialExecutor::enter() {
  const auto& name = place_->name;
  if (std::ranges::find(inside, Inside{getpid(), name}) != inside.end())
    throw UsageError(fmt::format("serial executor '{}': this thread is already in its run()", name));
  auto file = open_file();
  const auto deadline = base::Deadline::in_seconds(place_->timeout_s);
  for (auto pause_ns = first_pause_ns; !set_lock(file.get(), name, F_WRLCK);
       pause_ns = std::min(2 * pause_ns, timing::look_ns)) {
    if (deadline.passed() || base::interrupted()) throw busy(file.get(), name, place_->timeout_s);
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(pause_ns, deadline.remaining_ns())));
  }
  const pid_t pid = getpid();
  static_cast<void>(pwrite(file.get(), &pid, sizeof pid, place_of_pid(name)) == sizeof pid);
  inside.emplace_back(pid, name);
  turns.fetch_add(1, std::memory_order_acq_rel);
  place_->file = std::move(file);
}

void SerialExecutor::leave() noexcept {
  const auto file = std::move(place_->file);
  turns.fetch_add(1, std::memory_order_acq_rel);
  // In a process forked inside run() it only closes its copy: the parent has the turn.
  if (std::erase(inside, Inside{getpid(), place_->name}) > 0) set_lock(file.get(), place_->name, F_UNLCK);
}

}  // namespace accelmgr::launch
