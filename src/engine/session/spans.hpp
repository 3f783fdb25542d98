// What the threads of a session do, and when: each writes its spans into a ring of the session, always, with
// no lock and no system call. Times are of one clock for all processes of a machine (base/clock.hpp).
//
// As in the step history, a span is written before SpanRing::recorded counts it, in a place that no reader
// looks at until then. So there is nothing to mend when a process is killed in between; its replacement goes
// on after the last span that was whole. A reader copies, and then looks whether the place may have been
// written again meanwhile.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <optional>

#include "base/clock.hpp"
#include "base/unmovable.hpp"
#include "engine/session/layout.hpp"

namespace accelmgr::session {

/// How many spans there were since the session's beginning. They are numbered from 1.
inline std::uint64_t recorded_spans(const SpanRing& ring) noexcept {
  return ring.recorded.load(std::memory_order_acquire);
}
/// The number of the oldest of `recorded` spans that the ring still has, if it has any.
constexpr std::uint64_t first_span(std::uint64_t recorded) noexcept {
  return recorded > max_spans ? recorded - max_spans + 1 : 1;
}
/// nullopt: the ring does not have that span, or not any more.
std::optional<Span> span_numbered(const SpanRing& ring, std::uint64_t number) noexcept;

/// Writes the spans of one thread. A ring has one writer at a time.
class SpanWriter {
 public:
  explicit SpanWriter(SpanRing& ring) noexcept : ring_(&ring), pid_(getpid()) {}
  /// Appends a span of this process, whatever its `pid` says.
  void record(Span span) const noexcept;

 private:
  SpanRing* ring_;
  std::int32_t pid_;
};

/// Records a span from its construction to its destruction. Scopes nest.
class SpanScope : base::Unmovable {
 public:
  SpanScope(const SpanWriter& spans, Activity activity, std::uint64_t step,
            std::int64_t begin_ns = base::now_ns()) noexcept
      : spans_(spans), activity_(activity), step_(step), begin_ns_(begin_ns) {}
  ~SpanScope() {
    spans_.record({.begin_ns = begin_ns_,
                   .end_ns = base::now_ns(),
                   .step = step_,
                   .attempt = attempt_,
                   .pid = 0,
                   .rank = -1,
                   .activity = activity_});
  }
  void set_attempt(std::uint64_t attempt) noexcept { attempt_ = attempt; }

 private:
  const SpanWriter& spans_;
  Activity activity_;
  std::uint64_t step_;
  std::uint64_t attempt_ = 0;
  std::int64_t begin_ns_;
};

/// Records a thread that goes from one activity to the next: each span begins where the previous one ended.
class ActivityWriter {
 public:
  explicit ActivityWriter(SpanRing& ring) noexcept : spans_(ring) {}
  /// Ends the span under way, and begins another one. Activity::none: begins none.
  void enter(Activity activity, std::int64_t now_ns) noexcept;
  /// The span under way and those after it are of this attempt.
  void set_attempt(std::uint64_t step, std::uint64_t attempt) noexcept {
    under_way_.step = step;
    under_way_.attempt = attempt;
  }
  Activity activity() const noexcept { return under_way_.activity; }

 private:
  SpanWriter spans_;
  Span under_way_{
      .begin_ns = 0, .end_ns = 0, .step = 0, .attempt = 0, .pid = 0, .rank = -1, .activity = Activity::none};
};

}  // namespace accelmgr::session
