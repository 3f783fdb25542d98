#include "manager/watchdog.hpp"

#include <fmt/format.h>

#include "base/log.hpp"
#include "session/attempt.hpp"

namespace accelmgr::manager {
namespace {

/// Below this share of the time, a process that should compute does not.
constexpr double least_cpu_share = 0.05;
/// Between two looks: this process was suspended, or starved like all others.
constexpr std::int64_t gap_ns = 10 * Watchdog::interval_ns;

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
  if (away_ns > gap_ns) {
    // Its own gap proves nothing about the others: the time before it counts, the gap itself does not.
    for (auto& seen : seen_) {
      seen.since_ns += away_ns;
      if (seen.over_ns != 0) seen.over_ns += away_ns;
      if (seen.cpu_at_ns != 0) seen.cpu_at_ns += away_ns;
    }
    base::log().info("the supervisor was away for {:.1f} s", double(away_ns) / 1e9);
  }
  std::vector<Verdict> verdicts;
  const auto team = session_.control().team.load();
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    if ((team >> rank & 1) == 0 || session_.record(rank).life.load() != session::Life::ready) continue;
    if (auto why = judge(rank, now_ns)) verdicts.push_back({rank, std::move(*why)});
  }
  return verdicts;
}

std::optional<std::string> Watchdog::judge(int rank, std::int64_t now_ns) {
  auto& seen = seen_[static_cast<std::size_t>(rank)];
  const auto& record = session_.record(rank);
  const auto participants = session_.control().request.participants;
  const auto word = session_.word();
  const bool settled = record.settled.load() >= word.attempt;
  const bool takes_part = (participants >> rank & 1) != 0;

  const Seen now{.attempt = word.attempt,
                 .heartbeat = record.heartbeat.load(),
                 .cursor = record.cursor.load(),
                 .generation = record.generation.load()};
  const bool moved = now.attempt != seen.attempt || now.heartbeat != seen.heartbeat ||
                     now.cursor != seen.cursor || now.generation != seen.generation;
  if (now.attempt != seen.attempt || now.generation != seen.generation) seen.over_ns = 0;
  if (moved || settled || !takes_part) {
    const auto over_ns = seen.over_ns;
    seen = now;
    seen.since_ns = now_ns;
    seen.over_ns = over_ns;
  }
  if (settled || !takes_part) return std::nullopt;

  // Over: it is to come back, however lively it is.
  if (word.abort || word.closed) {
    if (seen.over_ns == 0) seen.over_ns = now_ns;
    if (now_ns - seen.over_ns < ns(config_.abort_grace)) return std::nullopt;
    return standing(rank, "has not left a step that is over within abort_grace", now_ns - seen.over_ns,
                    usage_(record.pid.load()));
  }
  const auto silent_ns = now_ns - seen.since_ns;
  if (word.committed(participants)) {
    if (silent_ns < ns(recovery_timeout_s)) return std::nullopt;
    return standing(rank, "does not finish its part of a committed step", silent_ns,
                    usage_(record.pid.load()));
  }
  const auto timeout_ns = ns(config_.runners.hang_timeout);
  if (timeout_ns == 0 || silent_ns < timeout_ns / 2) return std::nullopt;
  const auto usage = usage_(record.pid.load());
  if (!usage) return std::nullopt;  // It has ended; its pidfd tells.
  if (seen.cpu_at_ns == 0) {
    seen.cpu_at_ns = now_ns;
    seen.cpu_ns = usage->cpu_ns;
  }
  const auto observed_ns = now_ns - seen.cpu_at_ns;
  const bool computes =
      static_cast<double>(usage->cpu_ns - seen.cpu_ns) >= least_cpu_share * double(observed_ns);
  if (usage->state == 'R' && !computes) {
    // It waits for a processor: that others have them all proves nothing about it.
    seen.cpu_at_ns = now_ns;
    seen.cpu_ns = usage->cpu_ns;
    return std::nullopt;
  }
  if (silent_ns < timeout_ns) return std::nullopt;
  if (usage->state == 'T' || usage->state == 't') return standing(rank, "is stopped", silent_ns, usage);
  // As long as half of the silence, even where the first look came late: the kernel counts in ticks of 10 ms.
  if (observed_ns < timeout_ns / 2) return std::nullopt;
  if (!computes) return standing(rank, "hangs", silent_ns, usage);
  if (!seen.called_slow)
    base::log().warn("{}; it computes, and may go on until step_timeout",
                     standing(rank, "is slow", silent_ns, usage));
  seen.called_slow = true;
  return std::nullopt;
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
