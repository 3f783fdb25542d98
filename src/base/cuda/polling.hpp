// Waits for what can only be asked for: events of a device, the state of a communicator.
#pragma once

#include <sched.h>

#include <chrono>
#include <thread>

#include "base/clock.hpp"
#include "base/timing.hpp"

namespace accelmgr::device {

/// A wait spins this long, because an event that ends a step is often close, and then parks between polls.
inline constexpr std::int64_t spin_ns = 100'000;
inline constexpr std::chrono::microseconds parked{50};

enum class Waited { done, unwanted, late };

/// Calls `done` until it returns true. Asks `wanted` about every 20 ms, and ends when it returns false, or
/// after `timeout_s`.
template <class Done, class Wanted>
Waited poll_until(Done&& done, Wanted&& wanted, double timeout_s) {
  const auto begin = base::now_ns();
  const auto deadline = base::Deadline::in_seconds(timeout_s);
  for (auto looked = begin; !done();) {
    const auto now = base::now_ns();
    if (now - begin < spin_ns) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(parked);
    }
    if (now - looked < timing::look_ns) continue;
    looked = now;
    if (!wanted()) return Waited::unwanted;
    if (deadline.passed()) return done() ? Waited::done : Waited::late;  // Perhaps this process was stopped.
  }
  return Waited::done;
}

}  // namespace accelmgr::device
