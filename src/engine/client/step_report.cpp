#include "engine/client/step_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "base/clock.hpp"
#include "base/ipc/process.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/stored_text.hpp"

namespace accelmgr::client {
namespace {

using session::RunnerState;

constexpr std::uint64_t most_causes = 3;

std::vector<std::string> lines_of(const std::string& log) {
  std::vector<std::string> lines;
  std::istringstream text(log);
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

std::string who(const Failure& cause) {
  return cause.rank < 0 ? std::string("the fork server") : fmt::format("runner {}", cause.rank);
}

/// "runner 1 (pid 7) killed by signal 9 (KILL) in phase forward of attempt 2: what() said". `again` is true
/// if the cause before this one has the same text.
std::string one_line(const Failure& cause, bool again) {
  return fmt::format(
      "{} (pid {}) {}{}{}{}", who(cause), cause.pid, cause.exit,
      cause.rank < 0 ? "" : fmt::format(" in phase {} of attempt {}", cause.phase, cause.attempt),
      cause.what.empty() ? "" : ": ", again && !cause.what.empty() ? "the same again" : cause.what);
}

/// The number of elements of the source that were assigned, over all restarts.
std::uint64_t elements_assigned(const session::Session& session, const Config& config) noexcept {
  const auto& sharding = session.sharding();
  auto elements = sharding.first_element;
  const auto team = sharding.assigned_to.load(std::memory_order_acquire);
  for (int rank = 0; rank < session.ranks(); ++rank) {
    if ((team >> rank & 1) == 0) continue;
    const auto& queue = session.queue(rank);
    elements += (queue.published.load() - sharding.first_batch[rank]) *
                    static_cast<std::uint64_t>(config.batch_size_per_device) +
                queue.filling.load();
  }
  return elements;
}

}  // namespace

void Standings::look(const session::Session& session) noexcept {
  for (int rank = 0; rank < session.ranks(); ++rank) {
    auto& standing = of_[static_cast<std::size_t>(rank)];
    const auto phase = session.record(rank).phase.load();
    if (standing.since_ns != 0 && phase == standing.phase) continue;
    standing = {phase, base::now_ns()};
  }
}

std::string phases_of(const session::Session& session, const Config& config, session::RankMask ranks,
                      Standings* standings) {
  if (standings != nullptr) standings->look(session);
  std::string text;
  bool wait_for_data = false;
  for (int rank = 0; rank < session.ranks(); ++rank) {
    if ((ranks >> rank & 1) == 0) continue;
    const auto& record = session.record(rank);
    const auto state = record.state.load();
    const auto phase = record.phase.load();
    text += fmt::format("{}rank {} {}", text.empty() ? "" : ", ", rank,
                        state == RunnerState::lost || state == RunnerState::retiring
                            ? std::string("is being replaced")
                        : state == RunnerState::absent ? std::string("has not been started yet")
                                                       : fmt::format("in phase {}", to_string(phase)));
    if (standings == nullptr || state != RunnerState::ready) continue;
    text += fmt::format(" for {:.1f} s", double(base::now_ns() - standings->since_ns(rank)) / 1e9);
    wait_for_data = wait_for_data || phase == session::Phase::data;
  }
  if (wait_for_data)
    text += fmt::format(" (the data source '{}' has given {} elements so far; the step waits for it)",
                        config.data.kind, elements_assigned(session, config));
  return text;
}

void fill(StepResult& result, const session::Session& session, const std::string& total_name) {
  const auto& request = session.control().request;
  result.step = session.counters(session.word().index).steps;
  result.parameter_version = session.control().parameter_version.load();
  if (!result.counted) return;
  const auto total = session::tally(session, request);
  const double scale = session::mean_scale(request, total);
  result.loss = total.loss * scale;
  result.samples = total.samples;
  result.nonfinite = total.nonfinite;
  result.participants = static_cast<std::uint32_t>(__builtin_popcount(request.participants));
  std::uint64_t compute_ns = 0, reduce_ns = 0, data_ns = 0;
  for (int rank = 0; rank < session.ranks(); ++rank) {
    if ((request.participants >> rank & 1) == 0) continue;
    const auto& record = session.record(rank);
    compute_ns = std::max(compute_ns, record.ballot.compute_ns);
    reduce_ns = std::max(reduce_ns, record.reduce_ns.load());
    data_ns = std::max(data_ns, record.ballot.data_ns);
    const auto scalars = std::min<std::uint32_t>(record.ballot.scalars, session::max_scalars);
    for (std::uint32_t i = 0; i < scalars; ++i) {
      const auto& scalar = record.ballot.scalar[i];
      const auto name = session::text_of(scalar.name);
      auto found = std::find_if(result.scalars.begin(), result.scalars.end(),
                                [&](const auto& s) { return s.first == name; });
      if (found == result.scalars.end()) found = result.scalars.insert(found, {name, 0.0});
      found->second += name == total_name ? scalar.sum : scalar.sum * scale;
    }
  }
  result.compute_ms = double(compute_ns) / 1e6;
  result.reduce_ms = double(reduce_ns) / 1e6;
  result.data_ms = double(data_ns) / 1e6;
}

std::vector<Failure> last_causes(const session::Session& session) {
  std::vector<Failure> found;
  const auto last = session.control().incidents.load();
  for (auto number = last > most_causes ? last - most_causes + 1 : 1; number <= last; ++number) {
    const auto& incident = session.incident(number);
    auto& failure = found.emplace_back();
    failure.time_s = double(incident.time_ns) / 1e9;
    failure.rank = incident.rank;
    failure.pid = incident.pid;
    failure.phase = incident.rank < 0 ? "" : to_string(incident.phase);
    failure.what = session::text_of(incident.what);
    failure.log = lines_of(session::text_of(incident.log));
    failure.step = incident.step;
    failure.attempt = incident.attempt;
    ipc::set_exit(failure, incident.exit_status);
  }
  return found;
}

std::string text_of(const std::vector<Failure>& causes) {
  std::string text;
  for (std::size_t i = 0; i < causes.size(); ++i) {
    const bool again = i > 0 && causes[i].what == causes[i - 1].what;
    text += fmt::format("{}{}", i == 0 ? "" : "; then ", one_line(causes[i], again));
  }
  return text;
}

}  // namespace accelmgr::client
