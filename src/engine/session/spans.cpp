#include "engine/session/spans.hpp"

#include <iterator>

#include "engine/session/shared_words.hpp"

namespace accelmgr::session {

std::optional<Span> span_numbered(const SpanRing& ring, std::uint64_t number) noexcept {
  const auto recorded = recorded_spans(ring);
  if (number > recorded || number < first_span(recorded)) return std::nullopt;
  const auto span = load<Span>(ring.span[number % std::size(ring.span)]);
  // When max_spans later spans are recorded, its place may be written again.
  if (recorded_spans(ring) - number >= max_spans) return std::nullopt;
  return span;
}

void SpanWriter::record(Span span) const noexcept {
  span.pid = pid_;
  const auto number = ring_->recorded.load(std::memory_order_relaxed) + 1;
  store(ring_->span[number % std::size(ring_->span)], span);
  ring_->recorded.store(number, std::memory_order_release);
}

void ActivityWriter::enter(Activity activity, std::int64_t now_ns) noexcept {
  if (under_way_.activity != Activity::none) {
    under_way_.end_ns = now_ns;
    spans_.record(under_way_);
  }
  under_way_.activity = activity;
  under_way_.begin_ns = now_ns;
}

}  // namespace accelmgr::session
