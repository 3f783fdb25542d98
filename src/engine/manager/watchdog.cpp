#include "engine/manager/watchdog.hpp"

#include <fmt/format.h>

#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/session/attempt.hpp"

namespace accelmgr::manager {
namespace {

/// A process that uses less than this share of the time as CPU time does not compute.
constexpr double least_cpu_share = 0.05;

/// How much longer a committed reduction may take if the runner waits for a processor. Then others finish it,
/// before the host takes the supervisor for stuck.
constexpr double processor_margin_s = 2.0;
static_assert(processor_margin_s < timing::reduction_by_host_margin_s);

std::int64_t ns(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

}  // namespace

Watchdog::Watchdog(const Config& config, const session::Session& session, Usage usage)
    : config_(config),
      session_(session),
      usage_(std::move(usage)),
      seen_(static_cast<std::size_t>(session.ranks())) {}

std::vector<Verdict> Watchdog::look(std::int64_t now_ns) {
  const auto away_ns = looked_ns_ == 0 ? 0 : now_ns - looked_ns_;
  looked_ns_ = now_ns;
  if (away_ns > timing::supervisor_gap_ns) {
    // The supervisor did not run, which proves nothing about runners: the gap is not counted as silence.
    for (auto& seen : seen_) {
      seen.since_ns += away_ns;
      if (seen.over_ns != 0) seen.over_ns += away_ns;
      if (seen.cpu_at_ns != 0) seen.cpu_at_ns += away_ns;
    }
    base::log().info("the supervisor did not run for {:.1f} s", double(away_ns) / 1e9);
  }
  std::vector<Verdict> verdicts;
  const auto team = session_.control().team.load();
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    if ((team >> rank & 1) == 0 || session_.record(rank).state.load() != session::RunnerState::ready)
      continue;
    if (auto why = judge(rank, now_ns)) verdicts.push_back({rank, std::move(*why)});
    const auto at = static_cast<std::size_t>(rank);
    silent_ns_[at].store(seen_[at].since_ns == 0 ? 0 : now_ns - seen_[at].since_ns);
  }
  return verdicts;
}

std::int64_t Watchdog::silent_ns(int rank) const noexcept {
  return silent_ns_[static_cast<std::size_t>(rank)].load();
}

std::optional<std::string> Watchdog::judge(int rank, std::int64_t now_ns) {
  auto& seen = seen_[static_cast<std::size_t>(rank)];
  // First: the host writes the next request when all ranks have acknowledged this attempt.
  const session::RankMask participants = session_.control().request.participants;
  const session::Applies applies = session_.control().request.applies;
  const auto word = session_.word();
  const bool busy =
      (participants >> rank & 1) != 0 && session_.record(rank).acknowledged_attempt.load() < word.attempt;
  note_progress(rank, word.attempt, busy, seen, now_ns);
  if (!busy) return std::nullopt;
  if (word.closed && !word.abort && applies >= session::Applies::replicas)
    return judge_applying(rank, seen, now_ns);
  if (word.abort || word.closed) return judge_over(rank, seen, now_ns);
  if (word.committed(participants)) return judge_committed(rank, seen, now_ns);
  return judge_computing(rank, seen, now_ns);
}

void Watchdog::note_progress(int rank, std::uint64_t attempt, bool busy, Seen& seen,
                             std::int64_t now_ns) const {
  const auto& record = session_.record(rank);
  const Progress now{.attempt = attempt,
                     .heartbeat = record.heartbeat.load(),
                     .reduction = session_.reduction_progress(rank),
                     .generation = record.generation.load()};
  if (busy && now == seen.progress) return;
  const bool same_task = now.attempt == seen.progress.attempt && now.generation == seen.progress.generation;
  seen = {.progress = now, .since_ns = now_ns, .over_ns = same_task ? seen.over_ns : 0};
}

// The runner must leave an attempt that is over, even if its heartbeat advances.
std::optional<std::string> Watchdog::judge_over(int rank, Seen& seen, std::int64_t now_ns) const {
  if (seen.over_ns == 0) seen.over_ns = now_ns;
  const auto over_for_ns = now_ns - seen.over_ns;
  if (over_for_ns < ns(config_.abort_grace)) return std::nullopt;
  return standing(rank, "has not left a closed or aborted attempt within abort_grace", over_for_ns,
                  usage_of(rank));
}

// Its optimizer may take as long as forward and backward.
std::optional<std::string> Watchdog::judge_applying(int rank, Seen& seen, std::int64_t now_ns) const {
  if (seen.over_ns == 0) seen.over_ns = now_ns;
  const auto over_for_ns = now_ns - seen.over_ns;
  if (over_for_ns < ns(config_.step_timeout)) return judge_computing(rank, seen, now_ns);
  return standing(rank, "has not made the update of a committed step within step_timeout", over_for_ns,
                  usage_of(rank));
}

std::optional<std::string> Watchdog::judge_committed(int rank, Seen& seen, std::int64_t now_ns) const {
  const auto timeout_ns = ns(config_.runners.reduction_timeout);
  const auto silent_ns = now_ns - seen.since_ns;
  if (silent_ns < timeout_ns / 2) return std::nullopt;
  const auto usage = usage_of(rank);
  const bool waits = usage && waits_for_processor(*usage, seen, now_ns);
  if (silent_ns < timeout_ns + (waits ? ns(processor_margin_s) : 0)) return std::nullopt;
  return standing(rank, "does not finish its part of a committed step", silent_ns, usage);
}

std::optional<std::string> Watchdog::judge_computing(int rank, Seen& seen, std::int64_t now_ns) const {
  const auto timeout_ns = ns(config_.runners.hang_timeout);
  const auto silent_ns = now_ns - seen.since_ns;
  if (timeout_ns == 0 || silent_ns < timeout_ns / 2) return std::nullopt;
  const auto usage = usage_of(rank);
  if (!usage) return std::nullopt;  // It has ended. Its pidfd reports that.
  if (waits_for_processor(*usage, seen, now_ns) || silent_ns < timeout_ns) return std::nullopt;
  if (usage->state == 'T' || usage->state == 't') return standing(rank, "is stopped", silent_ns, usage);
  // CPU time is observed for at least half of the timeout, even if the first look came late: the kernel
  // counts it in ticks of 10 ms.
  if (now_ns - seen.cpu_at_ns < timeout_ns / 2) return std::nullopt;
  if (!computes(*usage, seen, now_ns)) return standing(rank, "hangs", silent_ns, usage);
  if (!seen.called_slow)
    base::log().warn("{}; it is computing and may go on until step_timeout",
                     standing(rank, "is slow", silent_ns, usage));
  seen.called_slow = true;
  return std::nullopt;
}

bool Watchdog::computes(const ipc::ProcessUsage& usage, const Seen& seen, std::int64_t now_ns) noexcept {
  return double(usage.cpu_ns - seen.cpu_ns) >= least_cpu_share * double(now_ns - seen.cpu_at_ns);
}

// That other processes have all processors proves nothing about this one: observing its CPU time begins
// again.
bool Watchdog::waits_for_processor(const ipc::ProcessUsage& usage, Seen& seen, std::int64_t now_ns) noexcept {
  if (seen.cpu_at_ns == 0) count_cpu_time(seen, usage, now_ns);
  if (usage.state != 'R' || computes(usage, seen, now_ns)) return false;
  count_cpu_time(seen, usage, now_ns);
  return true;
}

void Watchdog::count_cpu_time(Seen& seen, const ipc::ProcessUsage& usage, std::int64_t now_ns) noexcept {
  seen.cpu_at_ns = now_ns;
  seen.cpu_ns = usage.cpu_ns;
}

std::optional<ipc::ProcessUsage> Watchdog::usage_of(int rank) const {
  return usage_(session_.record(rank).pid.load());
}

std::string Watchdog::standing(int rank, const char* what, std::int64_t silent_ns,
                               const std::optional<ipc::ProcessUsage>& usage) const {
  const auto& record = session_.record(rank);
  const auto channel = ipc::wait_channel(record.pid.load());
  return fmt::format(
      "runner {} {}: {:.1f} s in phase {} (heartbeat {}{}{}{})", rank, what, double(silent_ns) / 1e9,
      to_string(record.phase.load()), record.heartbeat.load(),
      usage ? fmt::format(", state {}, {:.2f} s of CPU time", usage->state, double(usage->cpu_ns) / 1e9) : "",
      channel.empty() ? "" : ", waits in ", channel);
}

}  // namespace accelmgr::manager
