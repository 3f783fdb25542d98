#include "engine/session/step_history.hpp"

#include <algorithm>
#include <iterator>

#include "engine/session/shared_words.hpp"

namespace accelmgr::session {
namespace {

void add(Durations& durations, std::int64_t ns) noexcept {
  const auto bucket = std::lower_bound(duration_bounds_ns.begin(), duration_bounds_ns.end(), ns);
  ++durations.in_bucket[bucket - duration_bounds_ns.begin()];
  durations.sum_ns += ns;
}

void add(StepTotals& totals, const StepRecord& record) noexcept {
  ++totals.calls[static_cast<std::size_t>(record.status)];
  if (record.counted == 0) return;
  add(totals.duration, record.duration_ns);
  add(totals.compute, record.compute_ns);
  add(totals.reduce, record.reduce_ns);
  add(totals.wait, record.wait_ns);
  add(totals.data, record.data_ns);
  totals.last_loss = record.loss;
}

}  // namespace

void record_step(const HostView& host, const StepRecord& record) noexcept {
  auto& history = host.history();
  const auto number = history.recorded.load(std::memory_order_relaxed) + 1;
  auto totals = load<StepTotals>(history.totals[(number - 1) % 2]);
  add(totals, record);
  store(history.record[number % std::size(history.record)], record);
  store(history.totals[number % 2], totals);
  history.recorded.store(number, std::memory_order_release);
}

std::optional<StepRecord> step_record(const Session& session, std::uint64_t number) noexcept {
  const auto recorded = recorded_steps(session);
  if (number > recorded || number < first_step_record(recorded)) return std::nullopt;
  const auto& history = session.history();
  const auto record = load<StepRecord>(history.record[number % std::size(history.record)]);
  // When max_step_records later records exist, its place may be written again.
  if (recorded_steps(session) - number >= max_step_records) return std::nullopt;
  return record;
}

StepTotals step_totals(const Session& session) noexcept {
  const auto& history = session.history();
  for (;;) {
    const auto recorded = recorded_steps(session);
    const auto totals = load<StepTotals>(history.totals[recorded % 2]);
    if (recorded_steps(session) == recorded) return totals;
  }
}

}  // namespace accelmgr::session
