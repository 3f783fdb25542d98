#include "engine/session/spans.hpp"

#include "engine/session/shared_words.hpp"

namespace accelmgr::session {

std::optional<Span> span_numbered(const SpanRing& ring, std::uint64_t number) noexcept {
  return entry<Span>(ring.span, ring.recorded, number);
}

void SpanWriter::record(Span span) const noexcept {
  span.pid = pid_;
  append<Span>(ring_->span, ring_->recorded, span);
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
