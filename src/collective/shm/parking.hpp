// Waiting for something in shared memory that others change without telling, unless somebody is parked: so
// that a change costs no system call, and no write to a line that all share, while everybody spins.
//
//   who waits                            who changes
//   Parked parked(parking);              change.exchange(..., seq_cst);
//   if (changed) return;                 wake_parked(parking);
//   parked.wait(slice_ns);
//
// No wake-up is lost: both sides write before they read, in one total order. Either who waits sees the
// change, or who changes sees that somebody is parked and advances the epoch, which `parked` has read before.
#pragma once

#include <atomic>
#include <cstdint>

#include "ipc/epoch.hpp"

namespace accelmgr::collective::shm {

/// Plain data; all zeros is a valid one.
struct Parking {
  ipc::Epoch epoch;                               ///< Who changes something, when somebody is parked.
  alignas(64) std::atomic<std::uint32_t> parked;  ///< Who waits. One killed there stays counted.
};
static_assert(sizeof(Parking) == 128);

class Parked {
 public:
  explicit Parked(Parking& parking) noexcept : parking_(parking) {
    parking_.parked.fetch_add(1, std::memory_order_seq_cst);
    seen_ = ipc::load(parking_.epoch);
  }
  Parked(const Parked&) = delete;
  Parked& operator=(const Parked&) = delete;
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

inline void wake_parked(Parking& parking) noexcept {
  if (anybody_parked(parking)) ipc::wake_all(parking.epoch);
}

/// For the loop of one who spins.
inline void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace accelmgr::collective::shm
