// Measures the time of a batch from the loader's process to the runner's through the session's queue: from
// the call of publish() to the return of wait().
//
// The consumer maps the session itself, as a runner does, and checks that it gets the slot that the producer
// wrote: the same offset and the same bytes. A turn that is not timed counts the system calls of both
// processes during hand-offs.
#include <fmt/format.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "engine/session/batch_queue.hpp"
#include "measurement.hpp"

namespace {

using namespace accelmgr;

constexpr std::size_t sizes[] = {1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20};
constexpr int slots = 4;
constexpr int spin_until_filled_us = 1'000'000;
constexpr std::int64_t settle_ns = 500'000;

enum class Case { spinning, parked };

/// What producer and consumer tell each other. Each field has one writer.
struct Shared {
  alignas(64) std::atomic<std::int64_t> sent_ns;       ///< producer
  alignas(64) std::atomic<std::uint64_t> sent_offset;  ///< producer: the offset of the slot in the session.
  alignas(64) std::atomic<std::uint64_t> received;     ///< consumer: number of batches.
};

std::uint64_t offset_of(const session::Session& session, const std::byte* slot) {
  return static_cast<std::uint64_t>(slot - reinterpret_cast<const std::byte*>(&session.header()));
}

/// A harmless system call. CallCounter begins to count at the first one of a process and stops at the next.
void mark() { syscall(SYS_getppid); }

class HandOff {
 public:
  /// With `calls_counted` the processes make no system calls between hand-offs.
  HandOff(session::Session& session, Shared& shared, std::size_t bytes, Case in_case, int count,
          bool calls_counted)
      : session_(session),
        shared_(shared),
        bytes_(bytes),
        case_(in_case),
        count_(count),
        parks_between_(in_case == Case::parked && !calls_counted) {}

  void produce() const {
    session::BatchQueueWriter queue(session_, 0);
    mark();
    for (int i = 0; i < count_; ++i) {
      std::byte* slot = nullptr;
      while ((slot = queue.claim()) == nullptr) bench::relax();
      std::memset(slot, i, bytes_);
      shared_.sent_offset.store(offset_of(session_, slot));
      if (case_ == Case::parked) let_consumer_park();
      shared_.sent_ns.store(base::now_ns());
      queue.publish(1);
      wait_received(static_cast<std::uint64_t>(i) + 1);
    }
    mark();
  }

  /// Writes `count` latencies in microseconds to `us`.
  void consume(double* us) const {
    std::vector<int> fds;
    for (const int fd : session_.fds()) fds.push_back(dup(fd));
    std::vector<base::UniqueFd> owned(fds.begin(), fds.end());
    auto session = session::Session::attach(std::move(owned));
    const session::BatchQueue queue(session, 0);
    const int spin_us = case_ == Case::spinning ? spin_until_filled_us : 0;
    mark();
    for (int i = 0; i < count_; ++i) {
      const auto number = static_cast<std::uint64_t>(i);
      session::BatchQueue::Filled batch{};
      while (queue.wait(number, batch, spin_us, [] { return false; }) != session::BatchQueue::State::filled) {
      }
      us[i] = double(base::now_ns() - shared_.sent_ns.load()) / 1e3;
      check(session, batch.slot, i);
      session.counters(session.word().index).batches[0] = number + 1;  // Releases the slot as a commit does.
      shared_.received.store(number + 1);
      if (parks_between_) ipc::advance(session.control().finish);
    }
    mark();
  }

 private:
  void let_consumer_park() const {
    const auto& waiters = session_.queue(0).filled.waiters;
    do {
      const auto until = base::now_ns() + settle_ns;
      if (parks_between_) usleep(settle_ns / 1000);
      while (base::now_ns() < until) bench::relax();
    } while (waiters.load() == 0);
  }

  /// Waits as a loader does when all slots are full.
  void wait_received(std::uint64_t batches) const {
    auto& finish = session_.control().finish;
    for (;;) {
      const auto seen = ipc::load(finish);
      if (shared_.received.load() >= batches) return;
      parks_between_ ? void(ipc::wait_changed(finish, seen, 20'000'000, 0)) : bench::relax();
    }
  }

  void check(const session::Session& session, const std::byte* slot, int i) const {
    const auto sent = shared_.sent_offset.load(), found = offset_of(session, slot);
    if (sent != found)
      throw std::runtime_error(fmt::format(
          "queue: batch {} was written at offset {} of the session and arrived at {}", i, sent, found));
    if (slot[0] != std::byte(i) || slot[bytes_ - 1] != std::byte(i))
      throw std::runtime_error(fmt::format("queue: batch {} does not hold what was written into it", i));
  }

  session::Session& session_;
  Shared& shared_;
  std::size_t bytes_;
  Case case_;
  int count_;
  bool parks_between_;
};

/// Waits for traced processes and counts the system calls of each between its two marks. A traced process
/// stops at the entry and at the exit of every call.
class CallCounter {
 public:
  void add(pid_t pid) {
    int status = 0;
    if (waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status))
      throw std::runtime_error("queue: a traced process ended before it began");
    ptrace(PTRACE_SETOPTIONS, pid, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
    traced_[pid] = false;
    ptrace(PTRACE_SYSCALL, pid, nullptr, nullptr);
  }

  /// Returns the number of calls of all processes when they have ended.
  std::uint64_t count() {
    while (!traced_.empty()) {
      int status = 0;
      const pid_t pid = waitpid(-1, &status, 0);
      if (pid < 0) throw std::runtime_error("queue: the traced processes are gone");
      if (WIFEXITED(status) || WIFSIGNALED(status)) {
        if (status != 0) throw std::runtime_error("queue: a traced process failed");
        traced_.erase(pid);
        continue;
      }
      const bool at_call = WSTOPSIG(status) == (SIGTRAP | 0x80);
      if (at_call) see_call(pid);
      ptrace(PTRACE_SYSCALL, pid, nullptr, at_call ? 0 : WSTOPSIG(status));
    }
    return calls_;
  }

 private:
  void see_call(pid_t pid) {
    __ptrace_syscall_info info{};
    ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof info, &info);
    if (info.op != PTRACE_SYSCALL_INFO_ENTRY) return;
    auto& between_marks = traced_[pid];
    if (info.entry.nr == SYS_getppid) {
      between_marks = !between_marks;
    } else if (between_marks) {
      ++calls_;
    }
  }

  std::map<pid_t, bool> traced_;  ///< True while a process is between its marks.
  std::uint64_t calls_ = 0;
};

session::Session make_session(std::size_t bytes) {
  auto session = session::Session::create({.ranks = 1,
                                           .bytes = {.parameters = 64},
                                           .tensors = 1,
                                           .slots = slots,
                                           .slot_bytes = bytes,
                                           .batch_size = 1},
                                          1, 1);
  session.publish();
  return session;
}

double median_latency_us(std::size_t bytes, Case in_case, int count) {
  auto session = make_session(bytes);
  auto& shared = *new (bench::share<Shared>()) Shared{};
  const int warm_up = count / 10;
  const HandOff hand_off(session, shared, bytes, in_case, warm_up + count, /*calls_counted=*/false);
  auto* us = bench::share<double>(static_cast<std::size_t>(warm_up + count));
  bench::run_together(2, [&](int i) {
    std::optional<bench::Pin> pin;  // Not if parked: one process sleeps, so both may share a core.
    if (in_case == Case::spinning) pin.emplace(i, 2);
    i == 0 ? hand_off.produce() : hand_off.consume(us);
  });
  return bench::median({us + warm_up, us + warm_up + count});
}

/// System calls of both processes in one hand-off. Empty if processes may not be traced.
std::optional<double> system_calls(std::size_t bytes, Case in_case, int count) {
  auto session = make_session(bytes);
  auto& shared = *new (bench::share<Shared>()) Shared{};
  const HandOff hand_off(session, shared, bytes, in_case, count, /*calls_counted=*/true);
  std::vector<double> us(static_cast<std::size_t>(count));
  auto* refused = bench::share<std::atomic<bool>>();
  const auto traced = [&](const auto& work) {
    return bench::fork_worker([&] {
      if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) refused->store(true);
      raise(SIGSTOP);
      work();
    });
  };
  const pid_t workers[] = {traced([&] { hand_off.produce(); }), traced([&] { hand_off.consume(us.data()); })};
  CallCounter counter;
  for (const pid_t worker : workers) {
    siginfo_t stopped{};
    waitid(P_PID, static_cast<id_t>(worker), &stopped, WSTOPPED | WEXITED | WNOWAIT);
  }
  if (refused->load()) {
    for (const pid_t worker : workers) kill(worker, SIGKILL), waitpid(worker, nullptr, 0);
    return std::nullopt;
  }
  for (const pid_t worker : workers) counter.add(worker);
  return double(counter.count()) / count;
}

void measure(bool quick) {
  const int count = quick ? 50 : 400;
  bool counted = true;
  for (const std::size_t bytes : sizes) {
    for (const Case in_case : {Case::spinning, Case::parked}) {
      const char* name = in_case == Case::spinning ? "spinning" : "parked";
      const std::vector<std::pair<std::string, double>> size{{"bytes", double(bytes)}};
      bench::emit("ours", name, "latency", median_latency_us(bytes, in_case, count), "us", size);
      const auto calls = system_calls(bytes, in_case, 50);
      if (calls) bench::emit("ours", name, "system_calls", *calls, "calls", size);
      counted = counted && calls.has_value();
    }
  }
  if (!counted) fmt::print(stderr, "queue: processes may not be traced here; no system calls were counted\n");
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = bench::parse_quick(argc, argv);
  return bench::exit_code_of([&] { measure(quick); });
}
