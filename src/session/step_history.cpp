#include "session/step_history.hpp"

#include <algorithm>
#include <bit>
#include <iterator>

namespace accelmgr::session {
namespace {

/// Releases with each word: a reader that finds one of them finds what was stored before them, too.
template <class Data>
void store(SharedWords<Data>& words, const Data& data) noexcept {
  const auto plain = std::bit_cast<std::array<std::uint64_t, sizeof data / sizeof(std::uint64_t)>>(data);
  for (std::size_t i = 0; i < plain.size(); ++i) words[i].store(plain[i], std::memory_order_release);
}

template <class Data>
Data load(const SharedWords<Data>& words) noexcept {
  std::array<std::uint64_t, sizeof(Data) / sizeof(std::uint64_t)> plain;
  for (std::size_t i = 0; i < plain.size(); ++i) plain[i] = words[i].load(std::memory_order_acquire);
  return std::bit_cast<Data>(plain);
}

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
  // Its place is written again for the first record that does not fit beside it.
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
