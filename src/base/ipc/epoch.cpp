#include "base/ipc/epoch.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "base/clock.hpp"
#include "base/ipc/spin.hpp"

namespace accelmgr::ipc {
namespace {

// Without FUTEX_PRIVATE_FLAG: a private futex belongs to one address space and wakes no other process.
long futex(const std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* timeout) noexcept {
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

/// True if it was woken; false at the time `until_ns`, if a signal interrupts, or if the epoch has changed
/// already.
bool park(const Epoch& epoch, std::uint32_t seen, std::int64_t until_ns) noexcept {
  const auto left_ns = until_ns - base::now_ns();
  if (left_ns <= 0) return false;
  const timespec timeout{.tv_sec = left_ns / 1'000'000'000, .tv_nsec = left_ns % 1'000'000'000};
  return futex(epoch.value, FUTEX_WAIT, seen, &timeout) == 0;
}

}  // namespace

// No wake-up is lost. The waiter writes `waiters`, then the kernel reads `value` under the lock of the
// futex's bucket, which a wake takes as well. The advancer writes `value`, then reads `waiters`. All four are
// in one total order (seq_cst, and the system call is a full barrier). If the advancer reads 0, its write of
// `value` precedes the waiter's write of `waiters` and so the kernel's read: the kernel finds the new value
// and does not park. Otherwise the advancer wakes; the waiter is parked already, or will find the new value.
void advance(Epoch& epoch) noexcept {
  epoch.value.fetch_add(1, std::memory_order_seq_cst);
  if (epoch.waiters.load(std::memory_order_seq_cst) != 0) futex(epoch.value, FUTEX_WAKE, INT_MAX, nullptr);
}

void wake_all(Epoch& epoch) noexcept {
  epoch.value.fetch_add(1, std::memory_order_seq_cst);
  futex(epoch.value, FUTEX_WAKE, INT_MAX, nullptr);
}

bool wait_changed(const Epoch& epoch, std::uint32_t seen, std::int64_t timeout_ns, int spin_us) noexcept {
  if (load(epoch) != seen) return true;
  const auto begin_ns = base::now_ns();
  const auto changed = [&] { return load(epoch) != seen; };
  if (spin(changed, std::min<std::int64_t>(timeout_ns, spin_us * 1000LL))) return true;
  epoch.waiters.fetch_add(1, std::memory_order_seq_cst);
  // A wake may come late, for an advance that was already seen: then park again.
  while (park(epoch, seen, begin_ns + timeout_ns) && load(epoch) == seen) {
  }
  epoch.waiters.fetch_sub(1, std::memory_order_relaxed);
  return load(epoch) != seen;
}

}  // namespace accelmgr::ipc
