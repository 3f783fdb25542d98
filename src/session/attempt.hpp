// What host, supervisor and runners do with an attempt: the step word's transitions together with whom they
// wake.
#pragma once

#include <cstdint>

#include "session/layout.hpp"
#include "session/mean.hpp"
#include "session/session.hpp"

namespace accelmgr::session {

/// Host: writes the request, carries over what ranks that do not take part keep in the valid copies, opens
/// the next attempt, triggers the runners. Returns its number, 0 when the word is not closed.
std::uint64_t open_attempt(const Session& session, const Request& request) noexcept;

/// Runner: its bit. Wakes those who wait for the commit when it was the last. Its ballot and other copies are
/// written before.
Vote cast_vote(const Session& session, std::uint64_t attempt, int rank) noexcept;

/// Anyone: ends the attempt before it is committed, and wakes everyone. True when this call did.
/// Async-signal-safe.
bool abort_attempt(const Session& session, std::uint64_t attempt, std::uint32_t author) noexcept;

/// Runner: writes why into its record, then aborts. `what` is cut to text_bytes. Async-signal-safe.
bool refuse_attempt(const Session& session, std::uint64_t attempt, int rank, Reason reason,
                    const char* what) noexcept;

/// Anyone: closes a committed attempt whose slices are all finished, or an aborted one; wakes host and
/// loader. True when this call did.
bool close_if_over(const Session& session, std::uint64_t attempt) noexcept;

/// The sum of the participants' ballots, in order of rank.
Tally tally(const Session& session, const Request& request) noexcept;

/// The cursor of a rank's slice in the reduction: `chunk` counts from the slice's beginning, or is
/// cursor_finished.
struct Cursor {
  std::uint64_t attempt = 0;
  std::uint64_t chunk = 0;
  bool in_flight = false;
};
constexpr std::uint64_t encode(const Cursor& c) noexcept {
  return c.attempt << 27 | c.chunk << 1 | std::uint64_t{c.in_flight};
}
constexpr Cursor decode_cursor(std::uint64_t bits) noexcept {
  return {bits >> 27, bits >> 1 & ((1u << 26) - 1), (bits & 1) != 0};
}
/// The chunk number that says: this slice is finished.
constexpr std::uint64_t cursor_finished = (1u << 26) - 1;

}  // namespace accelmgr::session
