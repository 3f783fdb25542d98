#include "ipc/epoch.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "base/clock.hpp"

namespace accelmgr::ipc {
namespace {

// Not FUTEX_PRIVATE_FLAG: a private futex is keyed by the address space, and wakes nobody in another process.
long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* timeout) noexcept {
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

bool spin(const Epoch& epoch, std::uint32_t seen, std::int64_t until_ns) noexcept {
  constexpr int looks_per_clock = 16;  // The clock costs about as much as a few pauses.
  while (base::now_ns() < until_ns) {
    for (int i = 0; i < looks_per_clock; ++i) {
      if (load(epoch) != seen) return true;
      relax();
    }
  }
  return load(epoch) != seen;
}

/// Returns whether it was woken; false at the time `until_ns`, when a signal interrupts, or when it need not
/// park.
bool park(Epoch& epoch, std::uint32_t seen, std::int64_t until_ns) noexcept {
  const auto left_ns = until_ns - base::now_ns();
  if (left_ns <= 0) return false;
  const timespec timeout{.tv_sec = left_ns / 1'000'000'000, .tv_nsec = left_ns % 1'000'000'000};
  return futex(epoch.value, FUTEX_WAIT, seen, &timeout) == 0;
}

}  // namespace

// No wake-up is lost. The waiter writes `waiters`, then the kernel reads `value` (under the lock of the
// futex's bucket, which a wake takes as well); the advancer writes `value`, then reads `waiters`. All four
// are in one total order (seq_cst, and the system call is a full barrier), so if the advancer reads 0, its
// write of `value` precedes the waiter's write of `waiters` and thus the kernel's read: the kernel finds the
// new value and does not park. Otherwise the advancer wakes, and either the waiter is parked already, or it
// will find the new value.
void advance(Epoch& epoch) noexcept {
  epoch.value.fetch_add(1, std::memory_order_seq_cst);
  if (epoch.waiters.load(std::memory_order_seq_cst) != 0) futex(epoch.value, FUTEX_WAKE, INT_MAX, nullptr);
}

void wake_all(Epoch& epoch) noexcept {
  epoch.value.fetch_add(1, std::memory_order_seq_cst);
  futex(epoch.value, FUTEX_WAKE, INT_MAX, nullptr);
}

bool wait_changed(Epoch& epoch, std::uint32_t seen, std::int64_t timeout_ns, int spin_us) noexcept {
  if (load(epoch) != seen) return true;
  const auto begin_ns = base::now_ns();
  if (spin(epoch, seen, begin_ns + std::min<std::int64_t>(timeout_ns, spin_us * 1000LL))) return true;
  epoch.waiters.fetch_add(1, std::memory_order_seq_cst);
  // A wake may come late and be meant for an advance that was seen before: then go on.
  while (park(epoch, seen, begin_ns + timeout_ns) && load(epoch) == seen) {
  }
  epoch.waiters.fetch_sub(1, std::memory_order_relaxed);
  return load(epoch) != seen;
}

}  // namespace accelmgr::ipc
