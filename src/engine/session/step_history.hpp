// The last steps of a session, for those who watch it: other processes read them while the host goes on.
//
// A record and the totals are written before StepHistory::recorded counts them, in places that no reader
// looks at until then. So a host that is killed in between leaves nothing to mend. A reader copies, and then
// looks whether `recorded` has advanced so far that the place may have been written again.
#pragma once

#include <cstdint>
#include <optional>

#include "accelmgr/step_result.hpp"
#include "engine/session/session.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::session {

/// The record of a step that has just returned.
StepRecord record_of(const StepResult& result);
/// What a record keeps of the result.
StepResult result_of(const StepRecord& record);

/// Appends a record. Wait-free, and makes no system call.
void record_step(const HostView& host, const StepRecord& record) noexcept;

/// How many records there were since the session's beginning. They are numbered from 1.
inline std::uint64_t recorded_steps(const Session& session) noexcept {
  return session.history().recorded.load(std::memory_order_acquire);
}
/// The number of the oldest of `recorded` records that the session still has, if it has any.
constexpr std::uint64_t first_step_record(std::uint64_t recorded) noexcept {
  return recorded > max_step_records ? recorded - max_step_records + 1 : 1;
}

/// nullopt: the session does not have that record, or not any more.
std::optional<StepRecord> step_record(const Session& session, std::uint64_t number) noexcept;

/// Copies again if the host makes a step meanwhile.
StepTotals step_totals(const Session& session) noexcept;

}  // namespace accelmgr::session
