#include "engine/client/statistics.hpp"

#include <atomic>
#include <utility>

#include "base/ipc/process.hpp"

namespace accelmgr::client {
namespace {

std::uint64_t peak_memory(pid_t pid) {
  const auto usage = ipc::usage(pid);
  return usage && pid != 0 ? usage->peak_rss_bytes : 0;
}

}  // namespace

Statistics statistics_of(const session::Session& session, pid_t manager, bool memory) {
  const auto counters = session::read_counters(session, [](const auto& valid) { return valid; });
  const auto team = session.control().team.load();
  Statistics out;
  out.steps = counters.steps;
  out.attempts = session.word().attempt;
  out.samples = counters.samples;
  out.elements = counters.elements;
  out.skips = counters.skips;
  out.replacements = session.control().replacements.load();
  out.losses = session.control().incidents.load();
  out.parameter_version = session.control().parameter_version.load();
  out.session_bytes = session.used_bytes(__builtin_popcount(team));
  out.manager_pid = manager;
  out.manager_peak_memory_bytes = memory ? peak_memory(manager) : 0;
  for (int rank = 0; rank < session.ranks(); ++rank) {
    if ((team >> rank & 1) == 0) continue;
    const auto& record = session.record(rank);
    const auto pid = record.pid.load();
    out.runners.push_back({rank, pid, record.generation.load(), to_string(record.phase.load()),
                           record.attempt.load(), counters.rank_samples[rank], memory ? peak_memory(pid) : 0,
                           double(record.start_ns.load()) / 1e6, double(record.model_ns.load()) / 1e6});
  }
  return out;
}

}  // namespace accelmgr::client
