// What the threads of a session did: the spans that are in its memory (engine/session/spans.hpp), as JSON.
#pragma once

#include "engine/service/request.hpp"
#include "engine/service/service.hpp"

namespace accelmgr::service {

/// Answers `GET /v1/trace?since=POSITION` with the spans after that position, oldest first:
///
///   {"threads": [{"thread": "runner", "rank": 0, "overwritten": 0, "spans": [SPAN, ...]}, ...],
///    "next": POSITION, "more": false}
///   SPAN: {"begin_ns", "end_ns", "activity", "pid", "step", "attempt", "rank"}; the last three only if the
///   span has them. Times are those of CLOCK_MONOTONIC.
///
/// A position has one number for each thread: "17.2.0". "now" is the position behind all spans. Without
/// `since` the answer begins with the oldest span that the session has. `next` is the `since` of the next
/// request; if `more` is true, it can be made at once. `overwritten` counts the spans after `since` that the
/// session does not have any more. Throws Problem for another query.
void trace(Service& service, const Request& request, const Respond& respond);

}  // namespace accelmgr::service
