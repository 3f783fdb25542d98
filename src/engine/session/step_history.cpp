#include "engine/session/step_history.hpp"

#include <algorithm>
#include <chrono>
#include <concepts>

#include "engine/session/shared_words.hpp"
#include "engine/session/step_fields.hpp"

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

template <class From, class To>
void convert(const From& from, To& to) {
  if constexpr (std::same_as<From, double> && std::same_as<To, std::int64_t>)
    to = static_cast<To>(from * 1e6);
  else if constexpr (std::same_as<From, std::int64_t> && std::same_as<To, double>)
    to = static_cast<To>(from) / 1e6;
  else
    to = static_cast<To>(from);
}

}  // namespace

StepRecord record_of(const StepResult& result) {
  StepRecord record{};
  record.time_ns = std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  each_recorded_field(
      [&](const char*, auto of_result, auto of_record) { convert(result.*of_result, record.*of_record); });
  return record;
}

StepResult result_of(const StepRecord& record) {
  StepResult result;
  each_recorded_field(
      [&](const char*, auto of_result, auto of_record) { convert(record.*of_record, result.*of_result); });
  return result;
}

void record_step(const HostView& host, const StepRecord& record) noexcept {
  auto& history = host.history();
  const auto number = history.recorded.load(std::memory_order_relaxed) + 1;
  auto totals = load<StepTotals>(history.totals[(number - 1) % 2]);
  add(totals, record);
  store(history.totals[number % 2], totals);
  append<StepRecord>(history.record, history.recorded, record);
}

std::optional<StepRecord> step_record(const Session& session, std::uint64_t number) noexcept {
  return entry<StepRecord>(session.history().record, session.history().recorded, number);
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
