// An epoch: a counter in shared memory that processes wait on. Who changes something others wait for advances
// the epoch afterwards; who waits reads the epoch, looks whether there is work, and if not waits until the
// epoch is another:
//
//   for (;;) {
//     const auto seen = load(epoch);
//     if (look()) break;
//     wait_changed(epoch, seen, slice_ns, spin_us);   // then look after the others' pidfds
//   }
//
// There is no lock, so a process that dies anywhere in here stops nobody.
#pragma once

#include <atomic>
#include <cstdint>

namespace accelmgr::ipc {

/// Plain data; all zeros is a valid one.
struct alignas(64) Epoch {
  std::atomic<std::uint32_t> value;    ///< Whoever advances.
  std::atomic<std::uint32_t> waiters;  ///< Who waits. How many are parked; one killed there stays counted.
};
static_assert(sizeof(Epoch) == 64 && std::atomic<std::uint32_t>::is_always_lock_free);

/// Acquires: sees what was written before the advances it counts.
inline std::uint32_t load(const Epoch& epoch) noexcept { return epoch.value.load(std::memory_order_acquire); }

/// Releases; makes a system call only if somebody is parked.
void advance(Epoch& epoch) noexcept;

/// Advances and makes the system call in any case.
void wake_all(Epoch& epoch) noexcept;

/// Waits until the epoch is no longer `seen`: spins for `spin_us`, then parks. Returns whether it has
/// changed; false after `timeout_ns`, and early when a signal interrupts.
bool wait_changed(Epoch& epoch, std::uint32_t seen, std::int64_t timeout_ns, int spin_us) noexcept;

}  // namespace accelmgr::ipc
