// How long a call waits, and what may end its wait earlier.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>

#include "base/clock.hpp"
#include "base/timing.hpp"

namespace accelmgr::base {

class Patience {
 public:
  /// Empty `interrupted`: nothing ends the wait earlier.
  /// Requires: `interrupted` outlives this.
  explicit Patience(double seconds, const std::function<bool()>& interrupted = nothing) noexcept
      : seconds_(seconds), interrupted_(interrupted) {}

  double seconds() const noexcept { return seconds_; }
  /// The wait begins with the first call, which reads the clock: an operation that does not wait reads no
  /// clock.
  base::Deadline deadline() const noexcept {
    if (!deadline_) deadline_ = base::Deadline::in_seconds(seconds_);
    return *deadline_;
  }
  /// Whether the deadline has passed, or the wait was interrupted.
  bool over() const noexcept { return deadline().passed() || was_interrupted(); }
  /// Whether `interrupted` has returned true, or has thrown.
  bool was_interrupted() const noexcept {
    if (thrown_) return true;
    try {
      return interrupted_ && interrupted_();
    } catch (...) {
      thrown_ = std::current_exception();
      return true;
    }
  }
  /// What `interrupted` has thrown, for the caller to throw again when it has put its work in order.
  const std::exception_ptr& thrown() const noexcept { return thrown_; }
  /// How long to park until the next look.
  std::int64_t next_look_ns() const noexcept {
    return std::clamp<std::int64_t>(deadline().remaining_ns(), 0, timing::look_ns);
  }
  /// "within 5 s", "before it was interrupted"
  std::string bound() const {
    return deadline().passed() ? fmt::format("within {} s", seconds_) : "before it was interrupted";
  }

 private:
  inline static const std::function<bool()> nothing;

  double seconds_;
  const std::function<bool()>& interrupted_;
  mutable std::optional<base::Deadline> deadline_;
  mutable std::exception_ptr thrown_;
};

}  // namespace accelmgr::base
