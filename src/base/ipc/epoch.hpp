// An epoch: a counter in shared memory that processes wait on. A process that changes something advances the
// epoch afterwards. A process that waits for the change reads the epoch, looks for the change, and if there
// is none waits until the epoch differs:
//
//   for (;;) {
//     const auto seen = load(epoch);
//     if (look()) break;
//     wait_changed(epoch, seen, slice_ns, spin_us);   // then check pidfds and deadlines
//   }
//
// There is no lock, so a process that dies in here does not block others.
#pragma once

#include <atomic>
#include <cstdint>

namespace accelmgr::ipc {

/// Plain data; all zeros is a valid epoch.
struct alignas(64) Epoch {
  std::atomic<std::uint32_t> value;  ///< Written by processes that advance.
  /// The number of parked processes, written by them; one that is killed while parked stays counted. Mutable:
  /// processes that may not advance the epoch wait for it too.
  mutable std::atomic<std::uint32_t> waiters;
};
static_assert(sizeof(Epoch) == 64 && std::atomic<std::uint32_t>::is_always_lock_free);

/// Acquires: what other processes wrote before these advances is visible.
inline std::uint32_t load(const Epoch& epoch) noexcept { return epoch.value.load(std::memory_order_acquire); }

/// Releases. Makes a system call only if a process is parked.
void advance(Epoch& epoch) noexcept;

/// Advances, and always makes the system call.
void wake_all(Epoch& epoch) noexcept;

/// Blocks until the epoch is no longer `seen`: spins for `spin_us`, then parks. True if the epoch has
/// changed; false after `timeout_ns`, or earlier if a signal interrupts.
bool wait_changed(const Epoch& epoch, std::uint32_t seen, std::int64_t timeout_ns, int spin_us) noexcept;

}  // namespace accelmgr::ipc
