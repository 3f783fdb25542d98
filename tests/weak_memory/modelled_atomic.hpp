// std::atomic and the futex as Relacy models them. Sources of accelmgr that are included after this header
// run in Relacy's threads, in orders that a random scheduler chooses, and their loads read any value that the
// memory model of C++ does not hide from them: a missing order shows, also one that x86 never lets anybody
// miss.
//
// Relacy gives more than that model to seq_cst: a load reads no older value than the last store of seq_cst,
// whatever stands beside it. So a load has seq_cst only where the source names it. What the default says is
// acquired.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <climits>
#include <cstdint>
#include <ostream>
#include <streambuf>

#include "base/clock.hpp"
#include "base/unmovable.hpp"

// Not relacy.hpp, which makes macros of `new`, `assert` and `errno`.
#include <relacy/base.hpp>
#include <relacy/context.hpp>
// These need the two above.
#include <relacy/atomic.hpp>
#include <relacy/atomic_fence.hpp>
#include <relacy/backoff.hpp>
#include <relacy/context_base_impl.hpp>
#include <relacy/stdlib/condition_variable.hpp>
#include <relacy/stdlib/event.hpp>
#include <relacy/stdlib/mutex.hpp>
#include <relacy/stdlib/semaphore.hpp>
#include <relacy/test_suite.hpp>
#include <relacy/var.hpp>
#undef $

namespace accelmgr::session {
enum class Applies : std::uint32_t;
/// For Relacy's log.
inline std::ostream& operator<<(std::ostream& out, Applies value) { return out << std::uint32_t(value); }
}  // namespace accelmgr::session

namespace accelmgr::weak_memory {

inline const rl::debug_info nowhere("", "", 0);

/// The variable, if any, all of whose orders are taken away, or `fences`.
inline const void* relaxed = nullptr;
inline constexpr char fences = 0;

template <class T>
class Modelled {
 public:
  static constexpr bool is_always_lock_free = true;

  Modelled() = default;
  explicit Modelled(T value) { set(value); }
  void set(T value) { value_.store(value, rl::mo_relaxed, nowhere); }
  T load() const { return load(std::memory_order_acquire); }
  T load(std::memory_order order) const { return value_.load(of(order), nowhere); }
  void store(T value) { store(value, std::memory_order_release); }
  void store(T value, std::memory_order order) { value_.store(value, of(order), nowhere); }
  T exchange(T value, std::memory_order order = std::memory_order_seq_cst) {
    return value_.exchange(value, of(order), nowhere);
  }
  T fetch_add(T by, std::memory_order order = std::memory_order_seq_cst) {
    return value_.fetch_add(by, of(order), nowhere);
  }
  T fetch_sub(T by, std::memory_order order = std::memory_order_seq_cst) {
    return value_.fetch_sub(by, of(order), nowhere);
  }
  bool compare_exchange_strong(T& seen, T value, std::memory_order order = std::memory_order_seq_cst) {
    return value_.compare_exchange_strong(seen, value, of(order), nowhere);
  }
  bool compare_exchange_weak(T& seen, T value, std::memory_order order = std::memory_order_seq_cst) {
    return value_.compare_exchange_weak(seen, value, of(order), nowhere);
  }

  /// The system call. The kernel looks after a full barrier, and under a lock.
  long wait_while(T value) {
    auto& context = rl::ctx();
    context.sched();
    T seen;
    {
      const rl::preemption_disabler lock(context);
      seen = value_.load(rl::mo_seq_cst, nowhere);
    }
    if (seen != value) return -1;
    return value_.wait(context, false, false, nowhere) == rl::unpark_reason_normal ? 0 : -1;
  }
  long wake_all() {
    auto& context = rl::ctx();
    context.sched();
    context.atomic_thread_fence_seq_cst();
    return value_.wake(context, INT_MAX, nowhere);
  }

 private:
  rl::memory_order of(std::memory_order order) const {
    if (this == relaxed) return rl::mo_relaxed;
    switch (order) {
      case std::memory_order_relaxed:
        return rl::mo_relaxed;
      case std::memory_order_consume:
      case std::memory_order_acquire:
        return rl::mo_acquire;
      case std::memory_order_release:
        return rl::mo_release;
      case std::memory_order_acq_rel:
        return rl::mo_acq_rel;
      case std::memory_order_seq_cst:
        return rl::mo_seq_cst;
    }
    return rl::mo_seq_cst;
  }

  rl::atomic<T> value_;
};

inline void modelled_fence(std::memory_order order) {
  if (relaxed != &fences)
    rl::atomic_thread_fence(order == std::memory_order_acquire ? rl::mo_acquire : rl::mo_release, nowhere);
}

/// syscall(SYS_futex, ...)
template <class T>
long futex_call(long, const Modelled<T>* word, int operation, T value, const timespec*, std::nullptr_t, int) {
  auto* of = const_cast<Modelled<T>*>(word);
  return operation == FUTEX_WAIT ? of->wait_while(value) : of->wake_all();
}

}  // namespace accelmgr::weak_memory

// NOLINTBEGIN
namespace std {
using accelmgr::weak_memory::Modelled;
using accelmgr::weak_memory::modelled_fence;
}  // namespace std
#define atomic Modelled
#define syscall accelmgr::weak_memory::futex_call
#define atomic_thread_fence modelled_fence
// The sources assert the sizes of structures with atomics. Modelled ones are larger.
#define static_assert(...) static_assert(true)
// NOLINTEND
