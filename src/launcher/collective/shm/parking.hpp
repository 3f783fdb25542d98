// Waiting for a change in shared memory. A writer makes a system call only if a waiter is parked. While all
// waiters spin, a change costs no system call and no write to a cache line that all share.
//
//   waiter                               writer
//   Parked parked(parking);              change.exchange(..., seq_cst);
//   if (change.load(seq_cst)) return;    if (anybody_parked(parking)) ipc::wake_all(parking.epoch);
//   parked.wait(slice_ns);
//
// No wake-up is lost: both sides write before they read, in one total order. Either the waiter sees the
// change, or the writer sees that a waiter is parked and advances the epoch, whose value the waiter has read
// before.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/ipc/epoch.hpp"
#include "base/unmovable.hpp"

namespace accelmgr::collective::shm {

/// Plain data. All zeros is a valid state.
struct Parking {
  ipc::Epoch epoch;                               ///< Advanced by a writer, when a waiter is parked.
  alignas(64) std::atomic<std::uint32_t> parked;  ///< Number of waiters; written by each. A waiter that is
                                                  ///< killed stays counted.
};
static_assert(sizeof(Parking) == 128);

class Parked : base::Unmovable {
 public:
  explicit Parked(Parking& parking) noexcept : parking_(parking) {
    parking_.parked.fetch_add(1, std::memory_order_seq_cst);
    seen_ = ipc::load(parking_.epoch);
  }
  ~Parked() { parking_.parked.fetch_sub(1, std::memory_order_relaxed); }

  /// Returns whether it was woken.
  bool wait(std::int64_t timeout_ns) noexcept {
    return ipc::wait_changed(parking_.epoch, seen_, timeout_ns, 0);
  }

 private:
  Parking& parking_;
  std::uint32_t seen_;
};

inline bool anybody_parked(const Parking& parking) noexcept {
  return parking.parked.load(std::memory_order_seq_cst) != 0;
}

}  // namespace accelmgr::collective::shm
